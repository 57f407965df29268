"""The architectures, and the language model around any of them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memspan.models.registry import MODELS

if TYPE_CHECKING:
    from memspan.models.compressive.model import Compressive, CompressiveMemory
    from memspan.models.fast_weights.model import FastWeights, FastWeightsMemory
    from memspan.models.feedback.model import Feedback, FeedbackMemory
    from memspan.models.language_model import LanguageModel, Reader
    from memspan.models.output import BackboneOutput, Output
    from memspan.models.transformer_xl.model import TransformerXL, TransformerXLMemory

__all__ = [
    "MODELS",
    "BackboneOutput",
    "Compressive",
    "CompressiveMemory",
    "FastWeights",
    "FastWeightsMemory",
    "Feedback",
    "FeedbackMemory",
    "LanguageModel",
    "Output",
    "Reader",
    "TransformerXL",
    "TransformerXLMemory",
]

_HOMES = {
    "BackboneOutput": "output",
    "Compressive": "compressive.model",
    "CompressiveMemory": "compressive.model",
    "FastWeights": "fast_weights.model",
    "FastWeightsMemory": "fast_weights.model",
    "Feedback": "feedback.model",
    "FeedbackMemory": "feedback.model",
    "LanguageModel": "language_model",
    "Output": "output",
    "Reader": "language_model",
    "TransformerXL": "transformer_xl.model",
    "TransformerXLMemory": "transformer_xl.model",
}


def __getattr__(name: str) -> Any:
    # torch takes seconds to import, and options need none of it.
    if name not in _HOMES:
        raise AttributeError(f"module 'memspan.models' has no attribute {name!r}")
    return getattr(import_module(f"memspan.models.{_HOMES[name]}"), name)
