"""``memspan measure``: how far back runs remember."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from memspan.checks import at_least, check_types
from memspan.commands.parsing import Modules, parsed
from memspan.errors import MemspanError
from memspan.precision.options import MatmulPrecision, Products, refuse_contradictory_precision
from memspan.runs.config_files import load_config


@dataclass(frozen=True)
class MeasureArguments:
    """Measure how far back trained models remember: the span that their loss depends on, what a longer
    or shorter memory is worth, how long a random string is remembered, and where attention goes.

    Writes measure.json, measure.html and, with the extra plot, measure.png.
    """

    run: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run folders; several are compared."""
    corpus: str | None = None
    """A named corpus, file, folder or glob (None: each run's own)."""
    split: Literal["train", "validation", "test", "all"] = "validation"
    """Part of the corpus; all: the whole text in order."""
    longest: int = 2048
    """Tokens, the longest distance to measure."""
    budget: float = 45.0
    """CPU seconds to spend on each run; more time means narrower intervals."""
    out: Path | None = None
    """Folder for the report (None: the first run's)."""
    device: str = "auto"
    """auto, cpu, cuda, ..."""
    precision: Products = "auto"
    """Precision of matrix products: auto is float32. On a CPU without AVX-512 bfloat16 is many times
    slower."""
    matmul_precision: MatmulPrecision = "auto"
    """How products of float32 are computed (auto: as in training). See memspan train --help."""

    modules: Modules = ()

    def __post_init__(self) -> None:
        check_types(self)
        refuse_contradictory_precision(self.precision, self.matmul_precision)
        at_least(2, self, "longest")
        if not self.run:
            raise MemspanError("no run to measure: give one or more run folders")
        if not self.budget > 0:
            raise MemspanError(f"budget must be more than 0 seconds, not {self.budget:g}")


def measure(arguments: list[str]) -> None:
    """Run the verb with ``arguments``."""
    options = parsed(MeasureArguments, arguments, "memspan measure")
    for folder in options.run:
        # Says what is wrong with it, before torch is imported.
        load_config(folder)
    from memspan.data.corpora import is_there, load_corpus

    if options.corpus is not None and not is_there(options.corpus):
        load_corpus(options.corpus)
    import memspan
    from memspan.devices import device_for
    from memspan.measurement.report import Report, printed, written
    from memspan.runs.reading import precision_for

    found = []
    for folder in dict.fromkeys(options.run):
        run = memspan.load(folder, str(device_for(options.device)))
        with _bar(folder) as progress:
            found.append(
                memspan.measure(
                    run,
                    options.corpus,
                    split=options.split,
                    longest=options.longest,
                    budget=options.budget,
                    precision=precision_for(run, options.precision, options.matmul_precision),
                    progress=progress,
                )
            )
        if found[-1].interrupted:
            break
    report = Report(found)
    print(printed(report))
    for path in written(report, options.out or options.run[0]):
        print(f"written: {path}")
    if found[-1].interrupted:
        raise KeyboardInterrupt


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
