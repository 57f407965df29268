"""Tensors in other programs' files. Nothing in a file is executed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from memspan.errors import MemspanError
from memspan.files.disk import read_limited
from memspan.files.tensors import load_foreign
from memspan.lab.converters.torch_files import Stored, read, reason

JSON_LIMIT = 1 << 22
"""Maximum size of a JSON file in bytes: the index of a file in parts names every tensor."""
MOST_TIED = 4
"""Maximum number of times that a file's values may be used in its tensors, on average."""
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Files with the weights of a transformers folder: all of them, or an index of their parts."""


def load_weights(folder: Path) -> tuple[dict[str, Tensor], Path]:
    """The tensors of a folder of transformers, and the file that they come from."""
    for name in WEIGHTS:
        path = folder / name
        index = folder / f"{name}.index.json"
        if path.exists():
            return load_tensors(path), path
        if index.exists():
            return _in_parts(index), index
    raise MemspanError(
        f"{folder} has no weights: put {' or '.join(WEIGHTS)} of the checkpoint there"
    )


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors by name, from a safetensors file or a state dict that torch saved."""
    if path.suffix == ".safetensors":
        return load_foreign(path)
    return as_tensors(read(path), path)


def as_tensors(value: object, path: Path) -> dict[str, Tensor]:
    """``value`` from the file ``path``, if it is a state dict."""
    if not isinstance(value, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Stored) for name, tensor in value.items()
    ):
        raise MemspanError(
            f"{path} holds a {type(value).__name__}, not tensors by name: save the model's state_dict"
        )
    tensors = {}
    for name, stored in value.items():
        try:
            tensors[name] = stored.tensor()
        except Exception as error:
            # False claims about a tensor raise exceptions of many kinds.
            raise MemspanError(
                f"{path}: {name[:80]} is not in the file as it says ({reason(error)}): get it again"
            ) from None
    total = sum(tensor.nbytes for tensor in tensors.values())
    size = path.stat().st_size
    if total > MOST_TIED * size:
        raise MemspanError(
            f"{path} is {size:,} bytes, and its tensors would be {total:,}: save each by itself"
        )
    return tensors


def shape_of(
    tensors: dict[str, Tensor], name: str, n: int, path: Path, otherwise: str = "get it again"
) -> tuple[int, ...]:
    """The shape of a tensor that a model of this kind must have."""
    found = tuple(tensors[name].shape) if name in tensors else ()
    # Without columns, any number of rows could be claimed.
    if len(found) != n or 0 in found:
        raise MemspanError(f"{path} has no {name} of {n} dimensions: {otherwise}")
    return found


def _in_parts(index: Path) -> dict[str, Tensor]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(p, str) for p in places.values()):
        raise MemspanError(f"{index} has no weight_map from tensors to files: get it again")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        tensors |= load_tensors(index.parent / Path(name).name)
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        value = json.loads(read_limited(path, JSON_LIMIT))
    except (OSError, ValueError, RecursionError) as error:
        raise MemspanError(f"{path} is not there or not valid JSON ({error}): get it") from None
    if not isinstance(value, dict):
        raise MemspanError(f"{path} is not a JSON object: get it again")
    return value
