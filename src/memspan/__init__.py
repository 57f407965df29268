"""memspan: transformers with memory that read text of any length in constant memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memspan.errors import MemspanError

if TYPE_CHECKING:
    from memspan.memory import Memory
    from memspan.models import LanguageModel
    from memspan.runs.run import Run, load

__all__ = ["LanguageModel", "Memory", "MemspanError", "Run", "load"]
__version__ = "0.1.0"

_HOMES = {
    "LanguageModel": "memspan.models",
    "Memory": "memspan.memory",
    "Run": "memspan.runs.run",
    "load": "memspan.runs.run",
}


def __getattr__(name: str) -> Any:
    # torch takes seconds to import: the command line's help must not wait for it.
    if name not in _HOMES:
        raise AttributeError(f"module 'memspan' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
