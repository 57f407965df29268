"""Import public names on first use (PEP 562): torch takes seconds, and help does without it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazily(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Make ``__all__``, ``__getattr__`` and ``__dir__`` of ``package``.

    ``names``: the public names of each module that defines some. Type checkers need them as imports,
    too: a test keeps both equal.
    """
    homes = {name: module for module, defined in names.items() for name in defined}

    def get(wanted: str) -> Any:
        if wanted not in homes:
            # Python adds a guess to the message where it is given the name and the module.
            raise AttributeError(
                f"module {package!r} has no attribute {wanted!r}",
                name=wanted,
                obj=sys.modules[package],
            )
        return getattr(import_module(homes[wanted]), wanted)

    return sorted(homes), get, lambda: sorted(homes)
