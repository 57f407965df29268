"""Progress on a terminal, signals from it, and output that cannot fail.

No torch here: the command line prints before it imports torch.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from datetime import timedelta
from types import FrameType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from memspan.lab.printing import wrapped

PLAIN_SECONDS = 30
"""Seconds between the lines that replace a progress bar without a terminal."""
ESTIMATE_UPDATES = 100
"""The time left follows from the mean speed over this many updates of a progress bar."""
STOPPING = [signal.SIGINT, signal.SIGTERM]
"""Signals that stop training, with a checkpoint."""
IF_UNUSED: list[signal.Signals] = []
"""Signals that also stop it unless the program handles them: schedulers send them to a job before they
end it."""
if os.name == "posix":
    STOPPING.append(signal.SIGHUP)
    IF_UNUSED += [signal.SIGUSR1, signal.SIGUSR2]


@contextmanager
def unbreakable_output() -> Iterator[None]:
    """Printing inside never fails, so that a run outlives its terminal, pipe or log.

    The first failure is reported on standard error, if that can still be written.
    """

    def report(error: OSError) -> None:
        with suppress(OSError):
            print(
                f"memspan: the output cannot be written ({error.strerror}): training goes on, and "
                "is recorded in the run folder",
                file=stderr,
            )

    stdout = sys.stdout
    stderr = sys.stderr
    # They are None if the caller closed them.
    with (
        redirect_stdout(stdout and Unbreakable(stdout, report)),
        redirect_stderr(stderr and Unbreakable(stderr, lambda error: None)),
    ):
        yield


class Unbreakable(io.TextIOBase):
    """A text stream that drops output that ``target`` rejects; ``report`` is called the first time."""

    def __init__(self, target: TextIO, report: Callable[[OSError], None]) -> None:
        self._target = target
        self._report = report
        self._reported = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._target.encoding

    def isatty(self) -> bool:
        return self._target.isatty()

    def fileno(self) -> int:
        return self._target.fileno()

    def write(self, text: str) -> int:
        with self._reporting():
            self._target.write(text)
        return len(text)

    def flush(self) -> None:
        # Python also calls this as it exits, when the target may have been closed.
        if not self._target.closed:
            with self._reporting():
                self._target.flush()

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        # Every write is tried again: a full disk may have room by now.
        try:
            yield
        except OSError as error:
            if not self._reported:
                self._reported = True
                self._report(error)


class Terminal(Console):
    """A console whose lines end between words on a terminal; files and pipes get them whole.

    Without mark-up: names of corpora and folders may contain brackets.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet, markup=False, soft_wrap=True)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, strings in lines of the terminal's width."""
        if self.is_terminal:
            objects = tuple(
                wrapped(each, self.width) if isinstance(each, str) else each for each in objects
            )
        super().print(*objects, **options)


@contextmanager
def stoppable(ask: Callable[[int], None]) -> Iterator[None]:
    """Call ``ask`` with the number of the first signal inside: Ctrl-C, SIGTERM, SIGHUP (the terminal
    was closed), SIGUSR1 or SIGUSR2.

    A second one ends the process at once. Ignored signals, such as SIGHUP under nohup, stay ignored.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        ask(number)
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)

    handled = [n for n in STOPPING if signal.getsignal(n) is not signal.SIG_IGN]
    handled += [n for n in IF_UNUSED if signal.getsignal(n) is signal.SIG_DFL]
    try:
        before = {n: signal.signal(n, stop) for n in handled}
    except ValueError:  # Only the main thread may handle signals.
        before = {}
    try:
        yield
    finally:
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)


@contextmanager
def progress(console: Console, steps: int) -> Iterator[Callable[..., None]]:
    """A progress bar of ``steps`` steps; off a terminal, a line every :data:`PLAIN_SECONDS`.

    Yields:
        A function that updates it: ``completed`` (steps), ``loss`` (text), ``speed`` (tokens per
        second).
    """
    line = (
        "step {task.completed:,.0f}/{task.total:,.0f}",
        "loss {task.fields[loss]}  {task.fields[speed]:,.0f} tokens/s",
    )
    with _bar(console, line, steps, loss="?", speed=0) as show:
        yield show


@contextmanager
def counting(what: str, unit: str) -> Iterator[Callable[[float, float | None], None]]:
    """A progress bar on standard error, shown from the first call on; yields a function of the count
    and the total (None: unknown)."""
    # A folder's name may hold braces.
    what = what.replace("{", "{{").replace("}", "}}")
    with ExitStack() as stack:
        shown: list[Callable[..., None]] = []

        def progress(count: float, total: float | None) -> None:
            if not shown:
                of = "" if total is None else "/{task.total:,.0f}"
                line = (what, f"{{task.completed:,.0f}}{of} {unit}")
                console = Console(stderr=True, markup=False)
                bar = _bar(console, line, None if total is None else round(total))
                shown.append(stack.enter_context(bar))
            shown[0](completed=round(count))

        yield progress


@contextmanager
def _bar(
    console: Console, line: tuple[str, str], total: int | None, **fields: Any
) -> Iterator[Callable[..., None]]:
    """A bar between the two texts of ``line``, and the time left; off a terminal, plain lines."""
    left = line[0]
    right = line[1] + "{task.fields[rest]}"
    columns = (
        TextColumn(left, markup=False),
        BarColumn(bar_width=20),
        TextColumn(right, markup=False),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        bar.add_task("", total=total, rest="", **fields)
        (task,) = bar.tasks
        printed = time.monotonic()
        seen: deque[tuple[float, int]] = deque(maxlen=ESTIMATE_UPDATES)

        def show(completed: int, **values: Any) -> None:
            nonlocal printed
            seen.append((time.monotonic(), completed))
            bar.update(task.id, completed=completed, rest=_time_left(seen, total), **values)
            if not console.is_terminal and time.monotonic() - printed >= PLAIN_SECONDS:
                printed = time.monotonic()
                console.print(f"{left}  {right}".format(task=task), highlight=False)

        yield show


def _time_left(seen: Sequence[tuple[float, int]], total: int | None) -> str:
    """The time until ``total`` at the mean speed of ``seen`` (times and counts); empty if unknown."""
    start, first = seen[0]
    now, last = seen[-1]
    if total is None or last == first:
        return ""
    return f"  left {timedelta(seconds=round((now - start) * (total - last) / (last - first)))}"
