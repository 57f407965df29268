"""A checkpoint's ``state.json``: everything but its tensors, followed by a line with its SHA-256."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from torch import Tensor

from memspan.data.identity import Identity, recorded
from memspan.errors import MemspanError
from memspan.files.bytes import read_limited, write_atomically
from memspan.runs.places import folder_name

NAME = "state.json"
LIMIT = 1 << 20
"""Bytes of the file at most."""


class State(TypedDict):
    """What ``state.json`` holds; older versions left out what is not required."""

    step: int
    """Updates made."""
    best: float | None
    """Best validation score so far, nats per token; None before the first validation."""
    best_step: int | None
    """Its step."""
    unimproved: NotRequired[int]
    """Validations since the last one that early stopping counts as better; 0 in older files."""
    streams: dict[str, int]
    """Position in the training text."""
    corpus: Identity | str
    """See :func:`memspan.data.identity.recorded`."""
    metrics: dict[str, Any]
    """Size and checksum of ``metrics.jsonl``."""
    health: dict[str, int]
    """Updates skipped and memory rows reset because of NaN or infinity."""
    record: NotRequired[dict[str, Any]]
    """Where the corpus came from."""
    environment: NotRequired[dict[str, Any]]
    """What rounding depends on."""
    optimiser: NotRequired[str]
    """Its name, or its class where a function of the user's makes it."""
    files: NotRequired[dict[str, str]]
    """Checksums of the other files, by name; added when the checkpoint is saved."""


TYPES: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "best": (float, type(None)),
    "best_step": (int, type(None)),
    "streams": (dict,),
    "corpus": (dict, str),
    "files": (dict,),
    "metrics": (dict,),
    "health": (dict,),
}
"""Types of the entries that every saved state has."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything that training continues from."""

    weights: Mapping[str, Tensor]
    """By name, see :func:`memspan.runs.weights.weights_of`."""
    training: Mapping[str, Tensor]
    """Optimiser, carried memory and random states, by name."""
    state: State


def write(folder: Path, state: State, files: Mapping[str, str]) -> None:
    """Write the ``state.json`` of the checkpoint in ``folder``, with the checksums ``files``.

    Raises:
        MemspanError: the disk is full or the folder cannot be written.
    """
    content = json.dumps({**state, "files": dict(files)}, indent=1, sort_keys=True)
    check = hashlib.sha256(content.encode()).hexdigest()
    write_atomically(folder / NAME, f"{content}\n{check}\n".encode())


def read(folder: Path) -> State:
    """The state of the checkpoint in ``folder``.

    Raises:
        MemspanError: the file is missing or damaged, or of another step than the folder's name says.
    """
    path = folder / NAME
    try:
        text = read_limited(path, LIMIT).decode()
        content, check = text.removesuffix("\n").rsplit("\n", 1)
        if hashlib.sha256(content.encode()).hexdigest() != check:
            raise ValueError("its checksum is wrong")
        state: State = json.loads(content)
        entries: Mapping[str, object] = state  # type: ignore[assignment]
        for name, types in TYPES.items():
            if type(entries[name]) not in types:
                raise ValueError(f"its {name} is {type(entries[name]).__name__}")
        if min(state["step"], state["best_step"] or 0) < 0:
            raise ValueError("its step is negative")
        recorded(state["corpus"])
    except FileNotFoundError:
        raise MemspanError(f"{path} is missing: restore it") from None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise MemspanError(f"{path} is damaged ({error}): restore it") from None
    # Old checkpoints are deleted by their names.
    if folder.name != folder_name(state["step"]):
        raise MemspanError(
            f"{folder} holds the checkpoint of step {state['step']}: rename it to "
            f"{folder_name(state['step'])}"
        )
    return state
