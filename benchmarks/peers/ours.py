"""memspan's side: Transformer-XL with learned positions, the function that labml computes."""

from __future__ import annotations

import torch
from torch import Tensor

from memspan.config import EmbeddingConfig, TransformerXLConfig
from memspan.models import LanguageModel
from peers.sizes import VOCAB, Size


class Ours:
    def __init__(self, size: Size) -> None:
        self.size = size
        config = TransformerXLConfig(
            n_layers=size.n_layers,
            d_model=size.d_model,
            n_heads=size.n_heads,
            d_ff=size.d_ff,
            memory_length=size.memory,
            positions="learned",
            max_distance=size.segment + size.memory,
            attention_bias=True,
        )
        self.model = LanguageModel(VOCAB, config, EmbeddingConfig(tie=False, scale=False))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def full_memory(self, batch: int) -> object:
        """Every slot valid, as after many segments."""
        return self.model.initial_memory(batch, start="zeros")

    def trainer(self, tokens: Tensor, targets: Tensor):
        memory = self.full_memory(self.size.batch)

        def step() -> None:
            nonlocal memory
            self.model.train()
            out = self.model(tokens, memory, targets=targets)
            out.losses.mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            memory = out.memory.detach()

        return step

    def evaluator(self, tokens: Tensor, targets: Tensor):
        self.model.eval()
        reader = self.model.reader(self.full_memory(self.size.batch))
        return lambda: reader.read(tokens, targets=targets)

    def generator(self, batch: int):
        self.model.eval()
        reader = self.model.reader(self.full_memory(batch))
        token = torch.zeros(batch, 1, dtype=torch.long)
        return lambda: reader.read(token)
