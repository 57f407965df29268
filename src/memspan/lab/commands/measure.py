"""``memspan measure``: how far back runs and other models remember."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from memspan.errors import MemspanError
from memspan.lab.commands.parsing import TARGET_HELP, DeviceArguments, Field, Split, parsed
from memspan.lab.commands.standard_streams import STDIN, readable
from memspan.lab.commands.threads import OneThread, announce, set_threads
from memspan.lab.printing import say
from memspan.lab.runs.folder import is_shipped, place_of

if TYPE_CHECKING:
    from memspan.lab.measurement.measure import Measurement


@dataclass(frozen=True)
class MeasureArguments(DeviceArguments):
    """Measure how far back trained models remember: the span of context that lowers their loss, the
    effect of a longer or shorter memory, how long they recall a random string, and where they attend.
    Models that are not runs are measured for the span and the strings only.

    Writes measure.json and, with the extra plot, measure.png.
    """

    run: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(help=f"{TARGET_HELP} Several are compared."),
    ] = field(kw_only=True)
    corpus: str | None = None
    """A named corpus, file, folder or glob; -: standard input (None: each run's own; for other
    models tiny-shakespeare-held-out, which is included)."""
    field: Field = None
    split: Split = "auto"
    longest: int = 2048
    """Longest distance to measure, in tokens."""
    budget: float = 45.0
    """CPU seconds to spend on each run; more time means narrower intervals."""
    tokenizer: str | None = None
    """Tokeniser of models that are not runs: bytes, a tokenizer.json, or a folder in transformers'
    format (None: the one in the model's folder, or bytes)."""
    threads: OneThread = None
    trust_remote_code: bool = False
    """Execute code that comes with a folder in transformers' format."""
    out: Path | None = None
    """Folder for the report (None: the first target's, or the current folder if that target is not
    a run or is an included one)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.run:
            raise MemspanError("no run to measure: give one or more")
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise MemspanError(f"--out {self.out} is not a folder: name one, new or existing")


def measure(arguments: list[str]) -> None:
    """Run the verb with ``arguments``."""
    options = parsed(MeasureArguments, arguments, "memspan measure")
    found: list[Measurement] = []
    with readable(options.corpus, options.split) as text:
        announce(set_threads(options.threads, one=True))
        try:
            for name in dict.fromkeys(options.run):
                found.append(_measured(name, text, options))
                if found[-1].interrupted:
                    raise KeyboardInterrupt
        finally:
            # Results so far are reported, whatever stops it.
            if done := [measurement for measurement in found if not measurement.is_empty()]:
                _report(done, options)


def _measured(name: str, text: dict[str, Any], options: MeasureArguments) -> Measurement:
    import memspan
    from memspan.devices import device_for
    from memspan.lab.runs.run import Run, is_run, precision_for
    from memspan.lab.training.terminal import counting

    model: Run | str = name
    precision = None
    if is_run(name):
        model = memspan.load(name, str(device_for(options.device)))
        precision = precision_for(model, options.precision, options.matmul_precision)
    elif (options.precision, options.matmul_precision) != ("auto", "auto"):
        raise MemspanError(f"{name} is not a run: drop --precision and --matmul-precision")
    with counting(f"measuring {name}", "CPU s") as progress:
        measured = memspan.measure(
            model,
            **text,
            precision=precision,
            device=options.device,
            progress=progress,
            **options.keywords("corpus", "split", "out"),
        )
    if options.corpus == STDIN:
        measured = dataclasses.replace(measured, corpus="standard input")
    return measured


def _report(found: list[Measurement], options: MeasureArguments) -> None:
    from memspan.lab.measurement.report import Report, printed, written

    report = Report(found)
    say(printed(report))
    place = place_of(options.run[0])
    own = (place.run / "config.toml").is_file() and not is_shipped(place.run)
    folder = (place.checkpoint or place.run) if own else Path.cwd()
    out = options.out or folder
    before = {path for path in out.glob("measure.*") if path.is_file()}
    for path in written(report, out):
        say(f"{'replaced' if path in before else 'written'}: {path}")
