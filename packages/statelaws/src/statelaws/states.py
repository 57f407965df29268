"""States of any kind: their tensors and other leaves, copies of them, and their size."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import partial
from numbers import Number
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from statelaws.errors import RefusedError

PLAIN = (
    Number, str, bytes, bytearray, type(None), type(Ellipsis), Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""Leaves that are values, and hold nothing else."""


def tensors_of(state: Any) -> list[Tensor]:
    """All tensors within a state of any kind: containers, dataclasses and objects with attributes or
    slots."""
    return [leaf for leaf in leaves_of(state) if isinstance(leaf, Tensor)]


def leaves_of(state: Any) -> list[Any]:
    """The leaves of a state of any kind: its tensors, each once, numbers, strings, ..., without
    containers. What is none of :data:`PLAIN` may hold more than is known here, such as an array."""
    found: list[Any] = []
    seen: dict[int, Any] = {}
    waiting = [state]
    while waiting:
        part = waiting.pop()
        if isinstance(part, PLAIN):
            found.append(part)
            continue
        if isinstance(part, nn.Module | type | ModuleType) or id(part) in seen:
            continue
        seen[id(part)] = part
        parts = None if isinstance(part, Tensor) else parts_of(part)
        if parts is None:
            found.append(part)
        else:
            waiting += reversed(parts)
    return found


def parts_of(part: Any) -> list[Any] | None:
    """The parts of a container or an object (None: it is a leaf)."""
    if isinstance(part, FunctionType | MethodType | partial):
        # Its attributes are not what it works on.
        return None
    kind: Any = type(part)
    if kind.__getstate__ is not object.__getstate__:
        # Its own word on what is state, and what can be made again.
        return [part.__getstate__()]
    parts = None
    if isinstance(part, Mapping):
        parts = list(part.values())
    elif isinstance(part, list | tuple | set | frozenset | deque):
        parts = list(part)
    slots = [
        name
        for kind in type(part).__mro__
        for name in _names(vars(kind).get("__slots__", ()))
        if name not in ("__dict__", "__weakref__") and hasattr(part, name)
    ]
    if hasattr(part, "__dict__"):
        parts = [*(parts or []), *vars(part).values()]
    if slots:
        parts = [*(parts or []), *(getattr(part, name) for name in slots)]
    return parts


def _names(slots: str | Iterable[str]) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def mapped(function: Callable[[Tensor], Tensor], state: Any) -> Any:
    """A state of any kind with ``function`` applied to its tensors; containers are copied.

    Raises:
        RefusedError: a part of it is copied in its own way, in which ``function`` has no say.
    """
    results = {id(tensor): function(tensor) for tensor in tensors_of(state)}
    # deepcopy takes a part's copy from its memo if it is there.
    copy_ = copy.deepcopy(state, {**results})
    expected = {id(result) for result in results.values()}
    if any(id(tensor) not in expected for tensor in tensors_of(copy_)):
        raise RefusedError("its state holds tensors in an object that copies them in its own way")
    return copy_


def copied(state: Any) -> Any:
    """A copy of a state of any kind, without its gradients."""
    return mapped(lambda tensor: tensor.detach().clone(), state)


def stored(tensor: Tensor) -> Tensor:
    """A view that has each number of a tensor's memory once: without dimensions that were expanded."""
    if tensor.layout is not torch.strided:
        return tensor
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def size_of(leaves: Iterable[Any]) -> int:
    """Bytes behind a state's leaves: tensors' whole storages, each once.

    Raises:
        RefusedError: one of them has no size that is known here.
    """
    storages: dict[int, int] = {}
    rest = 0
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            try:
                storage = leaf.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
            except Exception:
                # Such as of a sparse tensor.
                rest += leaf.nbytes
        elif isinstance(leaf, str | bytes | bytearray):
            rest += len(leaf)
        elif isinstance(leaf, PLAIN):
            rest += 8
        elif isinstance(nbytes := getattr(leaf, "nbytes", None), int):
            # An array.
            rest += nbytes
        else:
            raise RefusedError(
                f"its state holds a {type(leaf).__name__}, whose size is not known here"
            )
    return sum(storages.values()) + rest
