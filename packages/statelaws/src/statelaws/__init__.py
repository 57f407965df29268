"""The laws of any model that carries state, and the interface that they need; imports only torch.

:class:`Stateful` says what a model is, :func:`check` tries the laws.
"""

from __future__ import annotations

from statelaws.caches import Causal
from statelaws.check import Finding, Report, check
from statelaws.protocol import (
    Claims,
    Inputs,
    NotOfferedError,
    ReadsPacked,
    ReadsPadded,
    RefusedError,
    Resets,
    Saves,
    Stateful,
    Truncates,
)
from statelaws.recurrent import Function, Recurrent

__all__ = [
    "Causal",
    "Claims",
    "Finding",
    "Function",
    "Inputs",
    "NotOfferedError",
    "ReadsPacked",
    "ReadsPadded",
    "Recurrent",
    "RefusedError",
    "Report",
    "Resets",
    "Saves",
    "Stateful",
    "Truncates",
    "check",
]


def __dir__() -> list[str]:
    return __all__
