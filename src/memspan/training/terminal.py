"""What a run shows on a terminal, and what it hears from there."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def stoppable(ask: Callable[[], None]) -> Iterator[None]:
    """Turn the first Ctrl-C or SIGTERM into a call of ``ask``; a second one stops at once."""

    def stop(number: int, frame: Any) -> None:
        ask()
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)

    try:
        before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: signals are someone else's
        before = {}
    try:
        yield
    finally:
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)


@contextmanager
def progress(console: Console, steps: int) -> Iterator[Callable[..., None]]:
    """A bar of so many steps; what is yielded takes ``completed``, ``loss``, ``bits``, ``speed``."""
    columns = (
        TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"),
        BarColumn(bar_width=20),
        TextColumn(
            "loss {task.fields[loss]:.3f}  {task.fields[bits]:.3f} bits/byte  "
            "{task.fields[speed]:,.0f} tokens/s  left"
        ),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=steps, loss=math.nan, bits=math.nan, speed=0)
        yield lambda **fields: bar.update(task, **fields)
