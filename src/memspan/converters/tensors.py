"""Tensors in files that others wrote. Nothing that a file says is run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from memspan.converters import legacy
from memspan.errors import MemspanError
from memspan.files.bytes import read_limited
from memspan.files.tensors import load_foreign

JSON_LIMIT = 1 << 24
"""Bytes of a JSON file at most: the index of a file in parts names every tensor."""
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Where a folder of transformers has its weights: each complete, or in parts that an index lists."""


class Inert:
    """What stands for an object of another program's class: its state, and nothing that runs."""

    state: dict[str, Any]

    # Not in __init__: a pickle can make an object without it.
    def __new__(cls, *_: object) -> Self:
        made = super().__new__(cls)
        made.state = {}
        return made

    def __setstate__(self, state: object) -> None:
        self.state = state if isinstance(state, dict) else {}


def load_weights(folder: Path) -> tuple[dict[str, Tensor], Path]:
    """The tensors of a folder of transformers, and the file that they come from.

    Raises:
        MemspanError: there is none, or it is damaged or holds more than tensors.
    """
    for name in WEIGHTS:
        path, index = folder / name, folder / f"{name}.index.json"
        if path.exists():
            return load_tensors(path), path
        if index.exists():
            return _in_parts(index), index
    raise MemspanError(
        f"{folder} has no weights: put {' or '.join(WEIGHTS)} of the checkpoint there"
    )


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors by name, from a safetensors file or a state dict that torch saved.

    Raises:
        MemspanError: it is damaged or holds more than tensors.
    """
    if path.suffix == ".safetensors":
        return load_foreign(path)
    return as_tensors(load_pickled(path), path)


def as_tensors(value: object, path: Path) -> dict[str, Tensor]:
    """``value`` from the file ``path``, if it is a state dict."""
    if not isinstance(value, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in value.items()
    ):
        raise MemspanError(
            f"{path} holds a {type(value).__name__}, not tensors by name: save the model's state_dict"
        )
    for name, tensor in value.items():
        if tensor.layout != torch.strided or tensor.is_meta:
            raise MemspanError(
                f"{path}: {name[:80]} is no dense tensor with values: save it as one"
            )
    return dict(value)


def load_pickled(path: Path, inert: Iterable[str] = ()) -> Any:
    """What ``torch.save`` wrote, if it is tensors and plain data.

    Args:
        path: the file.
        inert: names of classes whose objects become :class:`Inert`.

    Raises:
        MemspanError: it is damaged, or holds anything else.
    """
    try:
        with torch.serialization.safe_globals([(Inert, name) for name in inert]):
            # Of the older format only model objects need more than torch does.
            old = bool(inert) and path.is_file() and _begins(path, legacy.MAGIC)
            file = legacy.without_sources(path) if old else path
            return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise MemspanError(f"{path} is missing: put it there") from None
    except Exception as error:
        # Whatever a damaged file leads torch to: a dozen kinds. Its messages go on about torch.load.
        lines = str(error).splitlines()
        said = next((line for line in lines if "GLOBAL" in line), lines[0] if lines else "")
        raise MemspanError(
            f"{path} is damaged, or holds more than tensors, which is not read, since reading it could "
            f"run a program ({type(error).__name__}: {_reason(said)}): get it again from a source "
            "that you trust"
        ) from None


def _reason(said: str) -> str:
    """What torch says, without its advice to allow what it refuses."""
    return said.partition(" by default. ")[0].strip()[:120]


def shape_of(
    tensors: dict[str, Tensor], name: str, n_dimensions: int, path: Path, otherwise: str
) -> tuple[int, ...]:
    """The shape of a tensor that a model of this kind must have.

    Raises:
        MemspanError: there is none of so many dimensions in the file ``path``; ends in ``otherwise``.
    """
    found = tuple(tensors[name].shape) if name in tensors else ()
    if len(found) != n_dimensions:
        raise MemspanError(f"{path} has no {name} of {n_dimensions} dimensions: {otherwise}")
    return found


def _begins(path: Path, start: bytes) -> bool:
    with open(path, "rb") as file:
        return file.read(len(start)) == start


def _in_parts(index: Path) -> dict[str, Tensor]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(p, str) for p in places.values()):
        raise MemspanError(f"{index} has no weight_map from tensors to files: get it again")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise MemspanError(
                f"{index} names {name[:80]!r}, which is not in its folder: get it again"
            )
        if not (index.parent / name).exists():
            raise MemspanError(
                f"{index.parent / name} is missing: put this part of the weights there"
            )
        tensors |= load_tensors(index.parent / name)
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        MemspanError: the file is missing or no JSON object.
    """
    try:
        value = json.loads(read_limited(path, JSON_LIMIT))
    except FileNotFoundError:
        raise MemspanError(f"{path} is missing: put it there") from None
    except OSError as error:
        raise MemspanError(f"cannot read {path} ({error.strerror}): check the file") from None
    except (ValueError, RecursionError) as error:
        raise MemspanError(f"{path} is no valid JSON ({error}): get it again") from None
    if not isinstance(value, dict):
        raise MemspanError(f"{path} is no JSON object: get it again")
    return value
