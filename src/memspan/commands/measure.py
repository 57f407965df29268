"""``memspan measure``: how far back runs remember."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from memspan.checks import at_least
from memspan.commands.parsing import parsed
from memspan.commands.reading import RUN_HELP, DeviceArguments
from memspan.commands.standard_input import STDIN, readable
from memspan.errors import MemspanError
from memspan.runs.config_files import load_config
from memspan.runs.shipped import is_shipped, run_folder


@dataclass(frozen=True)
class MeasureArguments(DeviceArguments):
    """Measure how far back trained models remember: the span of context that lowers their loss, the
    effect of a longer or shorter memory, how long they recall a random string, and where they attend.

    Writes measure.json, measure.html and, with the extra plot, measure.png.
    """

    run: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(help=f"{RUN_HELP} Several are compared."),
    ] = field(kw_only=True)
    corpus: str | None = None
    """A named corpus, file, folder or glob; -: standard input (None: each run's own)."""
    field: str | None = None
    """Field or column that holds each record's text, in JSON Lines, Parquet and data sets (None: as in
    training)."""
    split: Literal["train", "validation", "test", "all"] = "validation"
    """Part of the corpus; all: the whole text in order."""
    longest: int = 2048
    """Longest distance to measure, in tokens."""
    budget: float = 45.0
    """CPU seconds to spend on each run; more time means narrower intervals."""
    out: Path | None = None
    """Folder for the report (None: the first run's, or the current folder where that run came with
    memspan)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(2, self, "longest")
        if not self.run:
            raise MemspanError("no run to measure: give one or more run folders")
        if not self.budget > 0:
            raise MemspanError(f"budget must be more than 0 seconds, not {self.budget:g}")
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise MemspanError(f"--out {self.out} is no folder: name one, new or not")


def measure(arguments: list[str]) -> None:
    """Run the verb with ``arguments``."""
    options = parsed(MeasureArguments, arguments, "memspan measure")
    for folder in options.run:
        # Says what is wrong with it, before torch is imported.
        load_config(folder)
    with readable(options.corpus) as corpus:
        _measure(options, corpus)


def _measure(options: MeasureArguments, corpus: str | None) -> None:
    """Measure the runs on ``corpus``, and write the report."""
    import memspan
    from memspan.devices import device_for
    from memspan.measurement.measure import Measurement
    from memspan.measurement.report import Report, printed, written
    from memspan.runs.reading import precision_for

    found: list[Measurement] = []
    stopped: BaseException | None = None
    for folder in dict.fromkeys(options.run):
        try:
            run = memspan.load(folder, str(device_for(options.device)))
            with _bar(folder) as progress:
                found.append(
                    memspan.measure(
                        run,
                        corpus,
                        field=options.field,
                        split=options.split,
                        longest=options.longest,
                        budget=options.budget,
                        precision=precision_for(run, options.precision, options.matmul_precision),
                        progress=progress,
                    )
                )
        except (MemspanError, KeyboardInterrupt) as error:
            stopped = error
            break
        if found[-1].interrupted:
            stopped = KeyboardInterrupt()
            break
    # Whatever stopped it: what is done is kept.
    done = [measurement for measurement in found if not measurement.is_empty()]
    if options.corpus == STDIN:
        done = [dataclasses.replace(measurement, corpus="standard input") for measurement in done]
    if done:
        report = Report(done)
        print(printed(report))
        for path in written(report, options.out or _own_folder(options.run[0])):
            print(f"written: {path}")
    if stopped is not None:
        raise stopped


def _own_folder(run: Path) -> Path:
    """Where a report on the run belongs."""
    folder = run_folder(run)
    return Path.cwd() if is_shipped(folder) else folder


@contextlib.contextmanager
def _bar(folder: Path) -> Iterator[Callable[[float, float], None]]:
    """A progress bar, from the first call on."""
    from memspan.training.terminal import counting

    with contextlib.ExitStack() as stack:
        shown: list[Callable[[int], None]] = []

        def progress(spent: float, budget: float) -> None:
            if not shown:
                what = f"measuring {folder}"
                shown.append(stack.enter_context(counting(what, "CPU s", round(budget))))
            shown[0](round(spent))

        yield progress
