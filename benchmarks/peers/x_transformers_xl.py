"""x-transformers with Transformer-XL memory and its relative position bias: another function of the
same size, so speed only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from x_transformers import Decoder, TransformerWrapper

from peers.ours import Ours
from peers.sizes import VOCAB, Size

PEER = "x-transformers"


class XTransformers:
    def __init__(self, size: Size) -> None:
        self.size = size
        self.model = TransformerWrapper(
            num_tokens=VOCAB,
            max_seq_len=size.segment,
            max_mem_len=size.memory,
            use_abs_pos_emb=False,
            attn_layers=Decoder(
                dim=size.d_model,
                depth=size.n_layers,
                heads=size.n_heads,
                attn_dim_head=size.d_model // size.n_heads,
                ff_mult=size.d_ff // size.d_model,
                rel_pos_bias=True,
            ),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def full_memory(self) -> list[Tensor]:
        size = self.size
        return [torch.zeros(size.batch, size.memory, size.d_model) for _ in range(size.n_layers)]

    def trainer(self, tokens: Tensor, targets: Tensor):
        memory = self.full_memory()

        def step() -> None:
            nonlocal memory
            self.model.train()
            logits, memory = self.model(tokens, mems=memory, return_mems=True)
            memory = [m.detach() for m in memory]
            F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

        return step

    def evaluator(self, tokens: Tensor, targets: Tensor):
        self.model.eval()
        memory = self.full_memory()

        def step() -> Tensor:
            nonlocal memory
            with torch.no_grad():
                logits, memory = self.model(tokens, mems=memory, return_mems=True)
                return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")

        return step


def make(size: Size, ours: Ours) -> XTransformers:
    return XTransformers(size)
