"""The files of a checkpoint: ``state.json``, and the tensors that one process wrote.

``state.json`` holds everything but the tensors, and is followed by a line with its SHA-256. The tensors
are in two files, the weights and everything else; ``shards.py`` is the format of several processes. All
of them record the checksums of the run's ``config.toml`` and ``tokenizer.json`` as the trainer loaded
them, so that weights beside another run's options are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor

from memspan.errors import MemspanError
from memspan.files.disk import read_limited, unreadable, write_atomically
from memspan.files.tensors import SEAL, load_tensors, save_tensors
from memspan.lab.data.token_files import Identity, recorded
from memspan.lab.runs import history
from memspan.lab.runs.folder import BOUND, checksum
from memspan.lab.runs.options import RunConfig
from memspan.models import LanguageModel
from memspan.models.options import BackboneConfig

STATE = "state.json"
WEIGHTS = "model.safetensors"
"""The run's best weights so far; also each checkpoint's own."""
TRAINING = "training.safetensors"
"""Everything but the weights."""
LIMIT = 1 << 20
"""Maximum size of ``state.json`` in bytes."""


class State(TypedDict):
    """The content of ``state.json``; a converted run leaves out the entries that are not required."""

    step: int
    """Updates made."""
    best: float | None
    """Best validation score so far, nats per token; None before the first validation."""
    best_step: int | None
    """Its step."""
    unimproved: int
    """Validations since the last one that early stopping counts as better."""
    streams: dict[str, int]
    """Position in the training text."""
    corpus: Identity
    """Empty for a converted run."""
    health: dict[str, int]
    """Updates skipped and memory rows reset because of NaN or infinity."""
    record: NotRequired[dict[str, Any]]
    """Where the corpus came from."""
    environment: NotRequired[dict[str, Any]]
    """Versions, devices and settings that rounding depends on."""
    optimiser: NotRequired[str]
    """Its name, or its class if the user's function makes it."""
    files: NotRequired[dict[str, str]]
    """Checksums of the other files, by name; added when the checkpoint is saved."""


TYPES: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "best": (float, type(None)),
    "best_step": (int, type(None)),
    "unimproved": (int,),
    "streams": (dict,),
    "corpus": (dict,),
    "files": (dict,),
    "health": (dict,),
}
"""Types of the entries that every saved state has."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything that training continues from."""

    weights: Mapping[str, Tensor]
    """Weights by name, see :func:`weights_of`."""
    training: Mapping[str, Tensor]
    """Optimiser, carried memory and random states, by name."""
    state: State


def write_state(folder: Path, state: State, files: Mapping[str, str]) -> None:
    """Write the ``state.json`` of the checkpoint in ``folder``, with the checksums ``files``."""
    content = json.dumps({**state, "files": dict(files)}, indent=1, sort_keys=True)
    check = hashlib.sha256(content.encode()).hexdigest()
    write_atomically(folder / STATE, f"{content}\n{check}\n".encode(), make_folder=False)


def read_state(folder: Path) -> State:
    """The state of the checkpoint in ``folder``."""
    path = folder / STATE
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
    except OSError as error:
        raise unreadable(path, error) from None
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise MemspanError(f"{path} is damaged ({error}): restore it") from None
    return state


def write_tensors(folder: Path, saved: Checkpoint, bound: Mapping[str, str]) -> dict[str, str]:
    """Write both files of tensors; returns the checksums of all files, ``bound`` included, by name."""
    about = header(saved.state, bound)
    files = {WEIGHTS: saved.weights, TRAINING: saved.training}
    sums = {
        name: save_tensors(folder / name, tensors, about, make_folder=False)
        for name, tensors in files.items()
    }
    return {**bound, **sums}


def read_file(folder: Path, name: str, state: State) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read one of the two files, with its header; an error if it is another checkpoint's."""
    tensors, about = load_tensors(folder / name)
    if about[SEAL] != state["files"].get(name) or about.get("step") != str(state["step"]):
        raise MemspanError(f"{folder / name} is another checkpoint's: restore its own")
    return tensors, about


def header(state: State, bound: Mapping[str, str]) -> dict[str, str]:
    """The header of a file of tensors, which makes it readable without its checkpoint."""
    corpus = json.dumps(state["corpus"], sort_keys=True)
    return {"step": str(state["step"]), "corpus": corpus, **bound}


def bound_files(state: State) -> dict[str, str]:
    """The checksums of the files that a saved checkpoint is bound to."""
    return {name: state["files"][name] for name in BOUND}


def refuse_changes(folder: Path, bound: Mapping[str, str]) -> None:
    """Raise if files have changed since weights were saved with the checksums ``bound``, except by
    resuming with new options."""
    for name in BOUND:
        check = checksum(folder / name)
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


def weights_of(model: LanguageModel) -> dict[str, Tensor]:
    """A model's parameters and buffers by name, every tied tensor once."""
    seen: set[int] = set()
    weights = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            weights[name] = tensor.detach()
            seen.add(id(tensor))
    return weights


def widened(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights stored in half precision, such as those of shipped runs, in float32."""
    return {
        name: tensor.float() if tensor.dtype == torch.float16 else tensor
        for name, tensor in weights.items()
    }


def check_fit(
    folder: Path, config: RunConfig[BackboneConfig], vocab_size: int, weights: Mapping[str, Tensor]
) -> None:
    """Raise if weights are another model's, before a model of these options takes memory or time."""
    if config.model.n_layers > len(weights):
        raise _misfit(folder, f"{len(weights)} tensors for {config.model.n_layers:,} layers")
    try:
        with torch.device("meta"):
            model = LanguageModel(vocab_size, config.model, config.embedding)
    except (RuntimeError, TypeError, MemspanError) as error:
        # Sizes too large to compute with.
        raise _misfit(folder, error) from None
    wanted = _forms(weights_of(model))
    given = _forms(weights)
    if differ := sorted(dict(wanted.items() ^ given.items())):
        name = differ[0]
        reason = f"{name} is {given.get(name, 'missing')}, not {wanted.get(name, 'there')}"
        raise _misfit(folder, reason)


def load_weights(model: LanguageModel, weights: dict[str, Tensor], folder: Path) -> None:
    """Copy ``weights`` of the run in ``folder`` into ``model``."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise _misfit(folder, error) from None


def _misfit(folder: Path, reason: object) -> MemspanError:
    return MemspanError(
        f"the weights in {folder} do not fit its config.toml ({str(reason)[:200]}): restore both"
    )


def _forms(weights: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in weights.items()}
