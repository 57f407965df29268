"""Laws of PyTorch models that carry state.

:class:`Stateful` says what a model is, :func:`check` tries the laws, and :func:`statelaws.testing.laws`
makes them cases of pytest.
"""

from __future__ import annotations

from statelaws import _quiet  # noqa: F401  (before anything imports torch)
from statelaws.adapters.function import Function, by_steps
from statelaws.adapters.recurrent import Recurrent
from statelaws.adapters.transformers import Causal
from statelaws.check import check
from statelaws.errors import NotOfferedError, RefusedError, StatelawsError
from statelaws.inputs import Inputs
from statelaws.protocol import (
    Claims,
    ReadsPacked,
    ReadsPadded,
    ReadsVarlen,
    Replays,
    Resets,
    Saves,
    Stateful,
    Truncates,
)
from statelaws.report import Finding, Report

__version__ = "0.1.0"
__all__ = [
    "Causal",
    "Claims",
    "Finding",
    "Function",
    "Inputs",
    "NotOfferedError",
    "ReadsPacked",
    "ReadsPadded",
    "ReadsVarlen",
    "Recurrent",
    "RefusedError",
    "Replays",
    "Report",
    "Resets",
    "Saves",
    "Stateful",
    "StatelawsError",
    "Truncates",
    "by_steps",
    "check",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
