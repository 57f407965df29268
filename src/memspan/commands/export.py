"""``memspan export``: merge the checkpoints of several processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from memspan.commands.parsing import parsed
from memspan.runs.config_files import load_config
from memspan.runs.shipped import run_folder


@dataclass(frozen=True)
class ExportArguments:
    """Turn the checkpoints of several processes into plain ones. A finished run has done so itself."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder; no trainer may be using it."""


def export(arguments: list[str]) -> None:
    """Run the verb with ``arguments``."""
    options = parsed(ExportArguments, arguments, "memspan export")
    load_config(options.run)
    from memspan.runs import checkpoints
    from memspan.runs.claim import claim

    with claim(run_folder(options.run)):
        steps = checkpoints.export(options.run)
    what = f"checkpoints of steps {', '.join(map(str, steps))}" if steps else "nothing to turn"
    print(f"{options.run}: {what}; best weights in {options.run / 'model.safetensors'}")
