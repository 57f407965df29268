"""The plain GPT as a side: segments of the same length, no memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from peers.gpt import GPT
from peers.side import VOCAB_SIZE, Side, Size


class PlainGPT(Side):
    """The floor: what a segment costs without memory and relative positions."""

    works = ("train", "evaluate")

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.model = GPT(
            VOCAB_SIZE,
            size.segment_length,
            size.n_layers,
            size.n_heads,
            size.d_model,
            size.d_ff,
        )

    def forget(self, batch_size: int) -> None:
        pass

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def read(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.model(tokens)
        if targets is None:
            return logits
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
