"""What binds weights and checkpoints to a run: checksums of its ``config.toml`` and ``tokenizer.json``.

These are the files as the trainer loaded them. Their checksums stand in the header of every file of
tensors and in every ``state.json``, so that weights beside another run's options are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from memspan.errors import MemspanError
from memspan.runs import history
from memspan.runs.run_lock import BOUND
from memspan.runs.state_file import State


def header(state: State, bound: Mapping[str, str]) -> dict[str, str]:
    """The header of a file of tensors, which can be understood without its checkpoint.

    Args:
        state: the checkpoint's.
        bound: checksums of the files in :data:`~memspan.runs.run_lock.BOUND`.
    """
    return {
        "step": str(state["step"]),
        "corpus": json.dumps(state["corpus"], sort_keys=True),
        **bound,
    }


def bound_files(state: State) -> dict[str, str]:
    """The checksums of the files that a saved checkpoint is bound to."""
    return {name: state["files"][name] for name in BOUND}


def refuse_changes(folder: Path, bound: Mapping[str, str]) -> None:
    """Refuse files that have changed since weights were saved, other than by resuming with new options.

    Args:
        folder: the run's.
        bound: checksums as saved; other entries are ignored.

    Raises:
        MemspanError: ``config.toml`` or ``tokenizer.json`` is missing or another one.
    """
    for name in BOUND:
        path = folder / name
        check = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"
        if bound.get(name) == check:
            continue
        if name == "config.toml":
            made = history.made(history.read(folder), check)
            if history.leads(made, bound.get(name), check):
                continue
        raise MemspanError(
            f"{name} in {folder} has changed since the run was saved: restore it; options of "
            f"training are changed by flags, such as --resume {folder} --train.steps 5000"
        )
