"""Ours: Fast Weights as the function that labml's computes, without the norm that it never uses."""

from __future__ import annotations

import torch
from torch import Tensor

from memspan.models import LanguageModel
from memspan.models.fast_weights.config import FastWeightsConfig
from memspan.models.options import EmbeddingConfig
from peers.side import VOCAB_SIZE, Side, Size


class MemspanFW(Side):
    """The model in training, every segment with an empty memory as in labml; otherwise its reader."""

    works = ("train", "attention", "generate")

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        config = FastWeightsConfig(
            n_layers=size.n_layers,
            d_model=size.d_model,
            n_heads=size.n_heads,
            d_ff=size.d_ff,
            norm="feed-forward",
        )
        self.model: LanguageModel = LanguageModel(
            VOCAB_SIZE, config, EmbeddingConfig(tie=False, scale=False)
        )

    def forget(self, batch_size: int) -> None:
        self.reader = None if self.model.training else self.model.reader(batch_size=batch_size)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model(tokens, targets=targets).loss

    def read(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return self.reader.read(tokens)
        return self.reader.read(tokens, targets=targets)

    def attention(self, x: Tensor) -> Tensor:
        backbone = self.model.backbone
        memory = backbone.initial_memory(len(x))
        own = memory.layers(memory.weights.dtype)[0]
        y, _ = next(backbone.stack()).attention(x, own)
        return y

    def embedding(self) -> torch.nn.Parameter:
        return self.model.embedding.tables[0]
