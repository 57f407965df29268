"""Ours: Transformer-XL as the function that labml's computes, learned positions and all."""

from __future__ import annotations

import torch
from torch import Tensor

from memspan.models import LanguageModel
from memspan.models.options import EmbeddingConfig
from memspan.models.transformer_xl.config import TransformerXLConfig
from peers.side import VOCAB_SIZE, Side, Size


class MemspanXL(Side):
    """The model in training, its reader for evaluation and generation."""

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.model: LanguageModel = LanguageModel(
            VOCAB_SIZE,
            TransformerXLConfig(
                n_layers=size.n_layers,
                d_model=size.d_model,
                n_heads=size.n_heads,
                d_ff=size.d_ff,
                memory_length=size.memory_length,
                positions="learned",
                max_distance=size.span,
                attention_bias=True,
            ),
            EmbeddingConfig(tie=False, scale=False),
        )

    def forget(self, batch_size: int) -> None:
        self.memory = self.model.initial_memory(batch_size)
        self.reader = None if self.model.training else self.model.reader(self.memory)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        out = self.model(tokens, self.memory, targets=targets)
        self.memory = out.memory.detach()
        return out.loss

    def read(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return self.reader.read(tokens)
        return self.reader.read(tokens, targets=targets)

    def embedding(self) -> torch.nn.Parameter:
        return self.model.embedding.tables[0]
