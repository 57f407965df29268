"""Detects optimiser state that checkpoints do not save: attributes, and other entries of groups.

A run could not resume from it bit for bit, so an optimiser whose step changes any is refused.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor

NUMBERS = (bool, int, float)
"""Types of a group's entries that checkpoints hold."""
DEEPEST = 8
"""Depth to which values in values are followed."""
OF_TORCH = frozenset(vars(torch.optim.SGD([torch.zeros(1)])))
"""Attributes that torch gives every optimiser."""


def kept(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Digests of all values outside an optimiser's per-parameter state, by place."""
    seen: set[int] = {id(optimizer.state)}
    seen.update(id(p) for group in optimizer.param_groups for p in group["params"])
    found = {
        "numpy's random numbers": _digest(np.random.get_state(), seen),  # noqa: NPY002
        "Python's random numbers": _digest(random.getstate(), seen),
    }
    for number, group in enumerate(optimizer.param_groups):
        seen.add(id(group))
        for key, value in group.items():
            if key not in ("params", "names", "lr") and type(value) not in NUMBERS:
                found[f"{key!r} in group {number}"] = _digest(value, seen)
    for name, value in vars(optimizer).items():
        if name not in OF_TORCH:
            found[f"attribute {name!r}"] = _digest(value, seen)
    return found


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Places where two results of :func:`kept` differ."""
    return [place for place in {**before, **after} if before.get(place) != after.get(place)]


def shared(optimizer: torch.optim.Optimizer) -> str | None:
    """The name of state that is one tensor for several parameters, or a parameter itself."""
    owners: dict[int, object] = {
        place: parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        for place in _places(parameter)
    }
    for parameter, values in optimizer.state.items():
        entries = values.items() if isinstance(values, dict) else ()
        for key, value in entries:
            for place in _places(value):
                if owners.setdefault(place, (id(parameter), key)) != (id(parameter), key):
                    return str(key)
    return None


def _places(value: object) -> Set[int]:
    """Addresses of a tensor's values in memory; empty for anything else."""
    if not isinstance(value, Tensor) or value.is_meta or not value.numel():
        return set()
    own: Any = value
    own = own.to_local() if hasattr(own, "to_local") else own
    return {own.untyped_storage().data_ptr()} - {0}


def _digest(value: object, seen: set[int]) -> str:
    total = hashlib.sha256()
    for part in _parts(value, set(seen), 0):
        total.update(part)
    return total.hexdigest()


def _parts(value: Any, seen: set[int], depth: int) -> Iterator[bytes]:
    """The content of a value as bytes; for an object, that of its attributes."""
    if isinstance(value, str | bytes | int | float | complex | None):
        yield f"{type(value).__name__} {value!r};".encode()
        return
    if id(value) in seen or depth > DEEPEST:
        return
    seen.add(id(value))
    yield f"{type(value).__name__};".encode()
    if isinstance(value, Tensor):
        if not value.is_meta:
            own: Any = value
            own = own.to_local() if hasattr(own, "to_local") else own
            yield own.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return
    if isinstance(value, np.ndarray):
        yield value.tobytes()
        return
    if isinstance(value, torch.Generator):
        value = value.get_state()
    elif isinstance(value, np.random.Generator):
        value = value.bit_generator.state
    elif isinstance(value, random.Random):
        value = value.getstate()
    if isinstance(value, Mapping):
        inner = [part for pair in value.items() for part in pair]
    elif isinstance(value, list | tuple | Set):
        inner = list(value)
    elif isinstance(value, Tensor):
        inner = [value]
    else:
        inner = [] if isinstance(value, type) else list(getattr(value, "__dict__", {}).values())
    for part in inner:
        yield from _parts(part, seen, depth + 1)
