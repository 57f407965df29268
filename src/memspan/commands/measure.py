"""``memspan measure``: how far back runs and other models remember."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from memspan.commands.parsing import TARGET_HELP, DeviceArguments, Field, Split, parsed
from memspan.commands.standard_streams import STDIN, readable, split_to_read
from memspan.errors import MemspanError
from memspan.runs.folder import is_shipped, place_of


@dataclass(frozen=True)
class MeasureArguments(DeviceArguments):
    """Measure how far back trained models remember: the span of context that lowers their loss, the
    effect of a longer or shorter memory, how long they recall a random string, and where they attend.
    For models that are not runs: the span and the strings.

    Writes measure.json, measure.html and, with the extra plot, measure.png.
    """

    run: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(help=f"{TARGET_HELP} Several are compared."),
    ] = field(kw_only=True)
    corpus: str | None = None
    """A named corpus, file, folder or glob; -: standard input (None: each run's own; for other models
    tiny-shakespeare-held-out, which comes with memspan)."""
    field: Field = None
    split: Split = "auto"
    longest: int = 2048
    """Longest distance to measure, in tokens."""
    budget: float = 45.0
    """CPU seconds to spend on each run; more time means narrower intervals."""
    tokenizer: str | None = None
    """For models that are not runs: bytes, a tokenizer.json, or a folder in transformers' format (None:
    the one in the model's folder, or bytes)."""
    trust_remote_code: bool = False
    """Execute code that comes with a folder in transformers' format."""
    out: Path | None = None
    """Folder for the report (None: the first run's, or the current folder if that is not a run or comes
    with memspan)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.run:
            raise MemspanError("no run to measure: give one or more")
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise MemspanError(f"--out {self.out} is not a folder: name one, new or existing")


def measure(arguments: list[str]) -> None:
    """Run the verb with ``arguments``."""
    options = parsed(MeasureArguments, arguments, "memspan measure")
    with readable(options.corpus) as corpus:
        _measure(options, corpus)


def _measure(options: MeasureArguments, corpus: str | None) -> None:
    """Measure the runs on ``corpus``, and write the report."""
    import memspan
    from memspan.devices import device_for
    from memspan.measurement.measure import Measurement
    from memspan.measurement.report import Report, printed, written
    from memspan.runs.run import Run, precision_for
    from memspan.targets import is_run
    from memspan.training.terminal import counting_on

    found: list[Measurement] = []
    stopped: BaseException | None = None
    for name in dict.fromkeys(options.run):
        try:
            model: Run | str = name
            precision = None
            if is_run(name):
                model = memspan.load(name, str(device_for(options.device)))
                precision = precision_for(model, options.precision, options.matmul_precision)
            elif (options.precision, options.matmul_precision) != ("auto", "auto"):
                raise MemspanError(f"{name} is not a run: drop --precision and --matmul-precision")
            with counting_on(f"measuring {name}", "CPU s") as progress:
                found.append(
                    memspan.measure(
                        model,
                        corpus,
                        field=options.field,
                        split=split_to_read(options.split, options.corpus),
                        longest=options.longest,
                        budget=options.budget,
                        precision=precision,
                        tokenizer=options.tokenizer,
                        trust_remote_code=options.trust_remote_code,
                        device=options.device,
                        progress=progress,
                    )
                )
        except (MemspanError, KeyboardInterrupt) as error:
            stopped = error
            break
        if found[-1].interrupted:
            stopped = KeyboardInterrupt()
            break
    # Whatever stopped it, the results so far are kept.
    done = [measurement for measurement in found if not measurement.is_empty()]
    if options.corpus == STDIN:
        done = [dataclasses.replace(measurement, corpus="standard input") for measurement in done]
    if done:
        report = Report(done)
        print(printed(report))
        place = place_of(options.run[0])
        own = (place.run / "config.toml").is_file() and not is_shipped(place.run)
        folder = (place.checkpoint or place.run) if own else Path.cwd()
        for path in written(report, options.out or folder):
            print(f"written: {path}")
    if stopped is not None:
        raise stopped
