"""An operation's inputs, which must go together, and its implementations: a table of what there is, and
the choice among them.

To add one, write it beside the others and give it an entry in its operation's table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from memspan.errors import MemspanError

Inputs = TypeVar("Inputs")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Implementation(Generic[Inputs, Result]):
    """One way to compute an operation."""

    run: Callable[[Inputs], Result]
    obstacle: Callable[[Inputs], str | None] = lambda inputs: None
    """Why these inputs cannot be computed, with a remedy, as the end of "the ... implementation";
    None if they can."""
    suits: Callable[[Inputs], bool] = lambda inputs: True
    """True if it is a fast choice for these inputs."""


def choose(
    table: Mapping[str, Implementation[Inputs, Result]], name: str | None, inputs: Inputs
) -> Callable[[Inputs], Result]:
    """The implementation called ``name``; None: the first in the table that suits and can run.

    Raises:
        MemspanError: there is no such implementation, or it cannot compute these inputs.
    """
    if name is None:
        for entry in table.values():
            if entry.suits(inputs) and entry.obstacle(inputs) is None:
                return entry.run
        raise AssertionError("the last implementation of a table runs everywhere")
    refuse_unknown_implementation(name, table)
    obstacle = table[name].obstacle(inputs)
    if obstacle is not None:
        raise MemspanError(f"the {name} implementation {obstacle}")
    return table[name].run


def refuse_unknown_implementation(name: str | None, known: Collection[str]) -> None:
    """Raise :class:`MemspanError` unless ``name`` is None or one of ``known``."""
    if name is not None and name not in known:
        raise MemspanError(f"there is no implementation {name!r}: use {', '.join(known)}")


def without_autocast(like: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast leaves operations of tensors such as ``like`` alone."""
    device = like.device.type
    if device == "meta":
        # Autocast does not know it.
        return nullcontext()
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def check_name(option: str, given: object, *known: str) -> None:
    """Refuse a value that is not one of the names that an ``option`` takes."""
    if given not in known:
        raise MemspanError(f"{option} must be {' or '.join(map(repr, known))}, not {given!r}")


def check_together(alike: bool = True, /, **tensors: Tensor | None) -> None:
    """Refuse tensors of one operation, by name, that are not floating-point tensors on one device or,
    with ``alike``, are of different types. None: not given."""
    first_name = device = dtype = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise MemspanError(f"{name} must be a floating-point tensor, not {kind}: convert it")
        if type(tensor).__name__ == "DTensor":
            # Loops in C read a tensor at its address, and this has none.
            raise MemspanError(
                f"{name} is a DTensor, of which other processes hold a part: give {name}.full_tensor()"
            )
        if first_name is None:
            first_name = name
            device = tensor.device
            dtype = tensor.dtype
        elif tensor.device != device:
            raise MemspanError(
                f"{name} is on {tensor.device} and {first_name} on {device}: move one of them"
            )
        elif alike and tensor.dtype != dtype:
            raise MemspanError(
                f"{name} is {_name(tensor.dtype)} and {first_name} {_name(dtype)}: convert one of them"
            )


def check_shape(name: str, tensor: Tensor | None, form: str, *sizes: int) -> None:
    """Refuse a ``tensor`` of other ``sizes``; ``form`` has their letters. None: not given."""
    if tensor is not None and tensor.shape != sizes:
        raise MemspanError(f"{name} must be {form}, {[*sizes]}, not {[*tensor.shape]}")


def check_rows(
    name: str,
    tensor: Tensor | None,
    dtype: torch.dtype,
    form: str,
    device: torch.device,
    *sizes: int,
) -> None:
    """Refuse a ``tensor`` of another type, device or ``sizes``; ``form`` has their letters. None: not
    given."""
    if tensor is not None and (
        tensor.dtype != dtype or tensor.shape != sizes or tensor.device != device
    ):
        raise MemspanError(
            f"{name} must be {_name(dtype)} {form}, {[*sizes]} on {device}, not "
            f"{_name(tensor.dtype)} {[*tensor.shape]} on {tensor.device}"
        )


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
