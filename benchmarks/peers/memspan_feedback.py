"""Ours: the Feedback Transformer as the function that labml's shared version computes."""

from __future__ import annotations

import torch
from torch import Tensor

from memspan.models import LanguageModel
from memspan.models.feedback.config import FeedbackConfig
from memspan.models.options import EmbeddingConfig
from peers.side import VOCAB_SIZE, Side, Size


class MemspanFeedback(Side):
    """The model in training, its reader for evaluation and generation.

    Every segment starts with an empty memory, as labml's does. Single tokens continue from the last
    segment, soon with a full memory of twice its length, where labml's start again.
    """

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.model: LanguageModel = LanguageModel(
            VOCAB_SIZE,
            FeedbackConfig(
                n_layers=size.n_layers,
                d_model=size.d_model,
                n_heads=size.n_heads,
                d_ff=size.d_ff,
                memory_length=size.memory_length,
                attention_bias=True,
                memory_norm=False,
                dropout=size.dropout,
                attention_dropout=size.dropout,
            ),
            EmbeddingConfig(tie=False, scale=False),
        )

    def forget(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model(tokens, targets=targets).loss

    def read(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        if tokens.shape[1] > 1:
            self.reader = self.model.reader(batch_size=self.batch_size)
            out = (
                self.reader.read(tokens)
                if targets is None
                else self.reader.read(tokens, targets=targets)
            )
            return out
        return self.reader.read(tokens)

    def embedding(self) -> torch.nn.Parameter:
        return self.model.embedding.tables[0]
