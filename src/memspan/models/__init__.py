"""The architectures, and the language model around any of them."""

from memspan.models.compressive import Compressive, CompressiveMemory
from memspan.models.fast_weights import FastWeights, FastWeightsMemory
from memspan.models.feedback import Feedback, FeedbackMemory
from memspan.models.language_model import LanguageModel, Reader
from memspan.models.output import BackboneOutput, Output
from memspan.models.registry import ARCHITECTURES
from memspan.models.transformer_xl import TransformerXL, TransformerXLMemory

__all__ = [
    "ARCHITECTURES",
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
