"""Transformer (Vaswani et al. 2017), pre-norm, with rotary positions (Su et al. 2021).

The baseline without memory: a token sees the earlier ones of its own segment and no others. Where
tokens are read one at a time, as in generation, each sees itself alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memspan.memory import Memory
from memspan.models.initialisation import initialise
from memspan.models.output import BackboneOutput
from memspan.models.protocol import Backbone
from memspan.models.segments import Padding, count_after, documents_of
from memspan.models.transformer.config import TransformerConfig
from memspan.nn import FeedForward, attention, dropout_layer, sinusoids
from memspan.ops.implementations import refuse_unknown_implementation


class TransformerLayer(nn.Module):
    """Attention and feed-forward sub-layers, each with its residual and norm."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        d = config.d_model
        self.n_heads, self.rate = config.n_heads, config.dropout
        self.query, self.key, self.value = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.output = nn.Linear(d, d, bias=False)
        self.feed_forward = FeedForward(d, config.d_ff, config.activation, config.dropout)
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.dropout = dropout_layer(config.dropout)

    def forward(self, x: Tensor, mask: Tensor, codes: Tensor, plain: bool) -> Tensor:
        """Read ``x [B, T, D]``; ``mask [B or 1, T, T]``; ``codes [T, K]``: sines, then cosines."""
        z, attend = self.attention_norm(x), attention if plain else F.scaled_dot_product_attention
        q, k, v = (
            f(z).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        q, k = rotated(q, codes), rotated(k, codes)
        attended = attend(q, k, v, mask[:, None], self.rate if self.training else 0.0)
        x = x + self.dropout(self.output(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


def rotated(x: Tensor, codes: Tensor) -> Tensor:
    """Each pair ``(x_i, x_{i + K/2})`` of ``x [B, H, T, K]`` turned by the angle of its position."""
    (a, b), (sine, cosine) = x.chunk(2, -1), codes.to(x.dtype).chunk(2, -1)
    return torch.cat([a * cosine - b * sine, a * sine + b * cosine], -1)


class Transformer(Backbone[Memory]):
    """The stack over vectors, see :class:`memspan.models.Backbone`. Reading depends on the cuts."""

    memory_type = Memory
    implementations = ("reference", "sdpa")
    config: TransformerConfig

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.dropout = dropout_layer(config.dropout)
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.n_layers))
        self.final_norm = nn.LayerNorm(config.d_model)
        initialise(self, config.initialisation, config.n_layers)

    def cut_invariant(self) -> bool:
        return False

    def initial_memory(self, batch_size: int) -> Memory:
        """Nothing but the number of tokens, 0."""
        return Memory(self.final_norm.weight.new_zeros(batch_size, dtype=torch.long))

    def forward(
        self,
        x: Tensor,
        memory: Memory | None = None,
        *,
        starts: Tensor | None = None,
        lengths: Tensor | None = None,
        padding: Padding = "right",
        implementation: str | None = None,
    ) -> BackboneOutput[Memory]:
        """Read a segment; ``implementation``: ``reference`` or ``sdpa``, PyTorch's fused attention."""
        refuse_unknown_implementation(implementation, self.implementations)
        seen = (self.initial_memory(len(x)) if memory is None else memory).tokens_seen
        x, documents = documents_of(x, starts, lengths, padding)
        position = torch.arange(x.shape[1], device=x.device)
        codes = sinusoids(position, self.config.d_model // self.config.n_heads, x.dtype)
        mask = (position <= position[:, None])[None]
        mask = mask if documents is None else documents.mask(mask)
        h = self.dropout(x)
        for layer in self.layers:
            h = self.through(layer, h, mask, codes, implementation == "reference")
        h = self.final_norm(h)
        h = h if documents is None else documents.put_back(h)
        return BackboneOutput(h, Memory(count_after(seen, x.shape[1], documents)), h.new_zeros(()))
