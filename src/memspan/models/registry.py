"""The one place that maps a name or a config to an architecture."""

from __future__ import annotations

from typing import Any

from torch import nn

from memspan.config import MODELS
from memspan.models.compressive import Compressive
from memspan.models.fast_weights import FastWeights
from memspan.models.feedback import Feedback
from memspan.models.transformer_xl import TransformerXL

ARCHITECTURES: dict[str, type[nn.Module]] = {
    "transformer-xl": TransformerXL,
    "compressive": Compressive,
    "fast-weights": FastWeights,
    "feedback": Feedback,
}
"""Architecture name -> backbone class, with the names of ``memspan.config.MODELS``."""


def backbone_for(config: Any) -> nn.Module:
    """The backbone that ``config``'s class belongs to."""
    name = next(name for name, kind in MODELS.items() if isinstance(config, kind))
    return ARCHITECTURES[name](config)
