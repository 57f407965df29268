"""The one place that maps a name or a config to an architecture; no torch until a model is made."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from memspan.models.compressive.config import CompressiveConfig
from memspan.models.fast_weights.config import FastWeightsConfig
from memspan.models.feedback.config import FeedbackConfig
from memspan.models.transformer_xl.config import TransformerXLConfig

MODELS: dict[str, type] = {
    "transformer-xl": TransformerXLConfig,
    "compressive": CompressiveConfig,
    "feedback": FeedbackConfig,
    "fast-weights": FastWeightsConfig,
}
"""Architecture name -> config class, whose folder has the backbone in ``model.py``."""


def backbone_class(name: str) -> Any:
    """The backbone of the architecture ``name``."""
    config = MODELS[name]
    module = import_module(config.__module__.removesuffix(".config") + ".model")
    return getattr(module, config.__name__.removesuffix("Config"))


def backbone_for(config: Any) -> Any:
    """The backbone that ``config``'s class belongs to."""
    name = next(name for name, kind in MODELS.items() if isinstance(config, kind))
    return backbone_class(name)(config)
