"""The classes of modules that kernels know, with their state when they were defined."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TypeVar

from torch import nn

Kind = TypeVar("Kind", bound=type[nn.Module])
METHODS: dict[type[nn.Module], dict[str, object]] = {}
"""The methods of each known class, as they were when it was defined."""
NAMES: dict[type[nn.Module], frozenset[str]] = {}
"""The names of these methods."""
ATTRIBUTES: dict[type[nn.Module], tuple[str, ...]] = {}
"""The attributes that its methods read besides its parameters and modules."""


def known(*attributes: str) -> Callable[[Kind], Kind]:
    """Decorate a class that kernels compute for.

    Its methods are remembered, so that a later replacement is noticed, and so are the names of the
    ``attributes`` whose values kernels assume.
    """

    def remember(kind: Kind) -> Kind:
        bases = [b for b in kind.__mro__ if issubclass(b, nn.Module) and b is not nn.Module]
        names = {
            name
            for base in bases
            for name, value in vars(base).items()
            if isinstance(value, FunctionType | property | staticmethod)
        }
        NAMES[kind] = frozenset({*names, "forward", "__call__"})
        METHODS[kind] = {name: getattr(kind, name) for name in NAMES[kind]}
        ATTRIBUTES[kind] = attributes
        return kind

    return remember
