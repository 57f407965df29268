"""The tensors of a checkpoint that one process wrote, in two files: its weights, and everything else.

``shards.py`` is the format of several processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from memspan.errors import MemspanError
from memspan.files.tensors import SEAL, load_tensors, save_tensors
from memspan.runs.binding import header
from memspan.runs.state_file import Checkpoint, State
from memspan.runs.weights import WEIGHTS

TRAINING = "training.safetensors"
"""Everything but the weights."""


def write(folder: Path, checkpoint: Checkpoint, bound: Mapping[str, str]) -> dict[str, str]:
    """Write both files into a checkpoint's ``folder``; their checksums by name.

    ``bound``: checksums of the files that the checkpoint is bound to.
    """
    about = header(checkpoint.state, bound)
    files = {WEIGHTS: checkpoint.weights, TRAINING: checkpoint.training}
    return {name: save_tensors(folder / name, tensors, about) for name, tensors in files.items()}


def read(folder: Path, state: State) -> Checkpoint:
    """The checkpoint in ``folder``, whose ``state.json`` holds ``state``.

    Raises:
        MemspanError: a file is missing, damaged, or of another checkpoint.
    """
    weights, training = (read_one(folder, name, state)[0] for name in (WEIGHTS, TRAINING))
    return Checkpoint(weights, training, state)


def read_one(folder: Path, name: str, state: State) -> tuple[dict[str, Tensor], dict[str, str]]:
    """One of the two files, with its header; otherwise as :func:`read`."""
    tensors, about = load_tensors(folder / name)
    if about[SEAL] != state["files"].get(name) or about.get("step") != str(state["step"]):
        raise MemspanError(f"{folder / name} is another checkpoint's: restore its own")
    return tensors, about
