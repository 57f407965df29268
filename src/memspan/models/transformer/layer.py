"""A transformer layer (Vaswani et al. 2017), pre-norm, with rotary positions (Su et al. 2021)::

x' = x + W_o attention(rotated(W_q z), rotated(W_k z), W_v z)      z = norm(x)
y  = x' + feed_forward(norm(x'))
"""

from __future__ import annotations

from torch import Tensor, nn

from memspan.models.transformer.config import TransformerConfig
from memspan.nn import FeedForward, attention, dropout_layer, rotated
from memspan.ops.first_derivatives import sdpa


class TransformerLayer(nn.Module):
    """Attention and feed-forward sub-layers, each with its residual and norm."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        d = config.d_model
        self.n_heads = config.n_heads
        self.rate = config.dropout
        self.query, self.key, self.value = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.output = nn.Linear(d, d, bias=False)
        self.feed_forward = FeedForward(d, config.d_ff, config.activation, config.dropout)
        self.attention_norm = nn.LayerNorm(d)
        self.feed_forward_norm = nn.LayerNorm(d)
        self.dropout = dropout_layer(config.dropout)

    def forward(self, x: Tensor, mask: Tensor, codes: Tensor, plain: bool) -> Tensor:
        """Read ``x [B, T, D]``; ``mask [B or 1, T, T]``; ``codes [T, K]``: sines, then cosines."""
        z = self.attention_norm(x)
        attend = attention if plain else sdpa
        q, k, v = (
            f(z).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        q = rotated(q, codes)
        k = rotated(k, codes)
        attended = attend(q, k, v, mask[:, None], self.rate if self.training else 0.0)
        x = x + self.dropout(self.output(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
