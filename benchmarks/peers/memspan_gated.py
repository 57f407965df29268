"""Ours: Gated DeltaNet as the function that layers of transformers compute, stacked in the same way."""

from __future__ import annotations

from memspan.models import LanguageModel
from memspan.models.gated_delta_net.config import GatedDeltaNetConfig
from memspan.models.options import EmbeddingConfig
from peers.memspan_fw import MemspanFW
from peers.side import VOCAB_SIZE, Side, Size


class MemspanGated(MemspanFW):
    """The model in training, every segment with an empty memory as in transformers; otherwise its
    reader."""

    works = ("train", "evaluate", "generate")

    def __init__(self, size: Size) -> None:
        Side.__init__(self, size)
        config = GatedDeltaNetConfig(
            n_layers=size.n_layers, d_model=size.d_model, n_heads=size.n_heads, d_ff=size.d_ff
        )
        self.model: LanguageModel = LanguageModel(
            VOCAB_SIZE, config, EmbeddingConfig(tie=False, scale=False)
        )
