"""x-transformers with Transformer-XL memory and T5 relative bias: a related function, not the same."""

from __future__ import annotations

from torch import Tensor
from x_transformers import Decoder, TransformerWrapper

from peers.side import VOCAB_SIZE, Side, Size


class XTransformersXL(Side):
    """It carries memory in training; it is not made for one-token steps with memory."""

    works = ("train", "evaluate")

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.model = TransformerWrapper(
            num_tokens=VOCAB_SIZE,
            max_seq_len=size.segment_length,
            max_mem_len=size.memory_length,
            use_abs_pos_emb=False,
            attn_layers=Decoder(
                dim=size.d_model,
                depth=size.n_layers,
                heads=size.n_heads,
                attn_dim_head=size.d_model // size.n_heads,
                ff_mult=size.d_ff / size.d_model,
                rel_pos_bias=True,
                rel_pos_max_distance=size.span,
            ),
        )

    def forget(self, batch_size: int) -> None:
        self.memory: list[Tensor] | None = None

    def logits(self, tokens: Tensor) -> Tensor:
        logits, self.memory = self.model(tokens, mems=self.memory, return_mems=True)
        return logits
