"""Ours: the Compressive Transformer as the function that labml's computes."""

from __future__ import annotations

from torch import Tensor

from memspan.models import LanguageModel
from memspan.models.compressive.config import CompressiveConfig
from memspan.models.options import EmbeddingConfig
from peers.memspan_xl import MemspanXL
from peers.side import VOCAB_SIZE, Side, Size


class MemspanCompressive(MemspanXL):
    """The model in training, its reader for evaluation and generation."""

    def __init__(self, size: Size) -> None:
        Side.__init__(self, size)
        self.model: LanguageModel = LanguageModel(
            VOCAB_SIZE,
            CompressiveConfig(
                n_layers=size.n_layers,
                d_model=size.d_model,
                n_heads=size.n_heads,
                d_ff=size.d_ff,
                memory_length=size.memory_length,
                compressed_length=size.compressed_length,
                auxiliary_loss="attention" if size.auxiliary_loss else "none",
                # Without its own loss, the task must train it, or the config is refused.
                task_gradient=not size.auxiliary_loss,
                positions="learned",
                max_distance=size.span,
                attention_bias=True,
            ),
            EmbeddingConfig(tie=False, scale=False),
        )

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        out = self.model(tokens, self.memory, targets=targets)
        self.memory = out.memory.detach()
        return out.loss
