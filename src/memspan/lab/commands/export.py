"""``memspan export``: merge the checkpoints of several processes, or write a run for transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from memspan.errors import MemspanError
from memspan.lab.commands.parsing import parsed
from memspan.lab.printing import say
from memspan.lab.runs.folder import run_alone
from memspan.lab.runs.options import load_config


@dataclass(frozen=True)
class ExportArguments:
    """Merge the checkpoints of several processes into plain ones; a finished run has already done so.
    With --to, write the best weights so far for another library instead."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder; without --to, it must not be in training."""
    to: Literal["transformers"] | None = None
    """Library to write the new folder DIR for (None: merge checkpoints)."""
    folder: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")] = None
    """New folder to write, with --to."""

    def __post_init__(self) -> None:
        if self.to is not None and self.folder is None:
            raise MemspanError(f"--to {self.to} needs the name of a new folder: add it")
        if self.to is None and self.folder is not None:
            raise MemspanError(
                f"{self.folder} is a folder to export to: name the library with --to transformers"
            )


def export(arguments: list[str]) -> None:
    """Run the verb with ``arguments``."""
    options = parsed(ExportArguments, arguments, "memspan export")
    config = load_config(options.run)
    run = options.run
    if options.folder is not None:
        from memspan.lab.integrations import transformers

        transformers.export(run, options.folder)
        say(f"{run}: exported to {options.folder}, whose README.md says how to load it")
        return
    from memspan.lab.runs import checkpoints
    from memspan.lab.runs.folder import lock_run

    folder = run_alone(run, "without --to all checkpoints of a run are merged")
    with lock_run(folder):
        steps = checkpoints.export(folder, config.train.keep)
    what = f"checkpoints of steps {', '.join(map(str, steps))}" if steps else "nothing to merge"
    say(f"{run}: {what}; best weights in {run / 'model.safetensors'}")
