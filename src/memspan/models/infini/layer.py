"""One layer of Infini-attention (Munkhdalai et al. 2024, arXiv 2404.07143), and its memory.

Each head attends within a block of ``S`` tokens, and reads all blocks before it from a matrix ``M``
and a sum of keys ``z`` (section 2.1), with ``σ = ELU + 1``::

    A_mem = σ(Q) M / (σ(Q) z)                                            eq. 3
    M' = M + σ(K)^T V                      z' = z + Σ_t σ(K_t)           eq. 4, update linear
    M' = M + σ(K)^T (V - σ(K) M / (σ(K) z))                              eq. 5, update delta
    A = sigmoid(β) A_mem + (1 - sigmoid(β)) A_dot                        eq. 6, one β per head

``M'`` and ``z'`` are written when a block is full, and read from the next block on. Positions, which
are rotary, are in ``A_dot`` alone.

Where a text is cut changes nothing. A memory says how far its row has come in its block (``length``)
and keeps the keys and values of that part: the next segment goes on with the block, which is written
once it has ``S`` tokens, and not before. A segment may end anywhere and may hold many blocks. They are
counted from the row's first token, and anew after a reset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from memspan.models.blocks import slots_in_use
from memspan.nn import FeedForward, attention, dropout_layer, rotated, sinusoids, where_in_use
from memspan.ops.fast_weights.feature_maps import elu_plus_one
from memspan.ops.first_derivatives import sdpa
from memspan.ops.implementations import refuse_unknown_implementation
from memspan.trees import LayerMemory, check_config, check_layer

if TYPE_CHECKING:
    from memspan.models.infini.config import InfiniConfig

IMPLEMENTATIONS = ("reference", "sdpa")
"""Implementations of attention within a block."""


@dataclass(frozen=True, repr=False)
class InfiniLayerMemory(LayerMemory):
    """The matrices of one layer, and the block that is not full, in float32 or better."""

    weights: Tensor
    """``M [B, H, K, K]``: keys by values."""
    key_sum: Tensor
    """``z [B, H, K]``."""
    keys: Tensor
    """Keys of the block so far, newest right-most, without positions: ``[B, H, S - 1, K]``."""
    values: Tensor
    """Values of the block so far, ``[B, H, S - 1, K]``."""
    length: Tensor
    """Tokens of the block so far, int64 ``[B]``."""


class InfiniAttention(nn.Module):
    """Attention within a block beside a memory of all blocks before, without a residual or a norm.

    Args:
        config: its width, heads, block and update; what concerns other parts of a model, such as
            ``n_layers``, is not looked at.
    """

    def __init__(self, config: InfiniConfig) -> None:
        check_config(self, config, "InfiniConfig")
        super().__init__()
        self.config = config
        inner = config.n_heads * config.head_width
        self.query, self.key, self.value = (
            nn.Linear(config.d_model, inner, bias=False) for _ in range(3)
        )
        self.gate = nn.Parameter(torch.zeros(config.n_heads))
        self.output = nn.Linear(inner, config.d_model, bias=False)

    def initial_memory(self, batch_size: int) -> InfiniLayerMemory:
        """A memory before the first token, in float32 or better."""
        return InfiniLayerMemory.zeros(self.gate, batch_size, row_sizes(self.config))

    def forward(
        self, x: Tensor, memory: InfiniLayerMemory | None = None, implementation: str | None = None
    ) -> tuple[Tensor, InfiniLayerMemory]:
        """Read ``x [B, T, D]`` after ``memory`` (None: nothing was read), which is not changed: the
        output ``[B, T, D]``, and the memory after the segment. ``implementation``: ``reference`` or
        ``sdpa``, PyTorch's fused attention.

        Raises:
            MemspanError: shapes, types or devices do not go together; there is no such implementation.
        """
        refuse_unknown_implementation(implementation, IMPLEMENTATIONS)
        memory = check_layer(self, x, self.config.d_model, memory)
        length = self.config.block_length
        q, k, v = (
            f(x).unflatten(-1, (self.config.n_heads, -1)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        codes = sinusoids(torch.arange(2 * length - 1, device=x.device), q.shape[-1], x.dtype)
        outputs = []
        # A block's worth of tokens fills at most one block of each row.
        for start in range(0, x.shape[1], length):
            part = [t[:, :, start : start + length] for t in (q, k, v)]
            y, memory = self._read(part, memory, codes, implementation == "reference")
            outputs.append(y)
        y = torch.cat(outputs, 2).transpose(1, 2).flatten(2)
        return self.output(y.to(x.dtype)), memory

    def _read(
        self, part: list[Tensor], memory: InfiniLayerMemory, codes: Tensor, plain: bool
    ) -> tuple[Tensor, InfiniLayerMemory]:
        """Read queries, keys and values ``[B, H, T, K]`` of at most ``S`` tokens: the output of each
        head ``[B, H, T, K]``, and the memory after them."""
        q, k, v = part
        size = self.config.block_length
        n_tokens = q.shape[2]
        keys = torch.cat([memory.keys, k.to(memory.keys)], 2)
        values = torch.cat([memory.values, v.to(memory.values)], 2)
        length = (memory.length + n_tokens) % size
        left = [where_in_use(t[:, :, n_tokens:], length) for t in (keys, values)]

        slots = slots_in_use(memory.length, size)
        keys, values = (t[:, :, size - 1 - slots :] for t in (keys, values))
        # Places in the block that memory is in: before its first token below 0, after its last from S.
        place = torch.arange(-slots, n_tokens, device=q.device) + memory.length[:, None]
        local = self._attend(q, keys, values, place, codes[-slots - n_tokens :], plain)
        block = place.div(size, rounding_mode="floor")
        # Sums over whole texts need float32, whatever precision the products have.
        with torch.autocast(q.device.type, enabled=False):
            full = (block == 0) & (memory.length + n_tokens >= size)[:, None]
            weights, key_sum = self._write(keys, values, full, memory)
            q = elu_plus_one(q.to(weights.dtype))
            y = retrieved(q, weights, key_sum).where(
                block[:, None, slots:, None] > 0, retrieved(q, memory.weights, memory.key_sum)
            )
            share = self.gate.sigmoid().to(weights.dtype)[:, None, None]
            y = share * y + (1 - share) * local.to(weights.dtype)
        return y, InfiniLayerMemory(weights, key_sum, left[0], left[1], length)

    def _attend(
        self, q: Tensor, keys: Tensor, values: Tensor, place: Tensor, codes: Tensor, plain: bool
    ) -> Tensor:
        """``A_dot [B, H, T, K]``: each token's block up to it.

        Args:
            keys: of the slots in use and the segment, as the values, ``[B, H, N + T, K]``.
            place: their tokens' places, ``[B, N + T]``; blocks begin at multiples of ``S``.
            codes: their rotary positions.
        """
        slots = keys.shape[2] - q.shape[2]
        block = place.div(self.config.block_length, rounding_mode="floor")
        mask = (place[:, None] <= place[:, slots:, None]) & (
            block[:, None] == block[:, slots:, None]
        )
        return (attention if plain else sdpa)(
            rotated(q, codes[slots:]),
            rotated(keys.to(q.dtype), codes),
            values.to(q.dtype),
            mask[:, None],
            self.config.dropout if self.training else 0.0,
        )

    def _write(
        self, keys: Tensor, values: Tensor, written: Tensor, memory: InfiniLayerMemory
    ) -> tuple[Tensor, Tensor]:
        """``M'`` and ``z'`` after the tokens that ``written [B, N + T]`` marks."""
        features = elu_plus_one(keys)
        if self.config.update == "delta":
            values = values - retrieved(features, memory.weights, memory.key_sum)
        features, values = (
            t.masked_fill(~written[:, None, :, None], 0) for t in (features, values)
        )
        return memory.weights + features.mT @ values, memory.key_sum + features.sum(2)


def retrieved(features: Tensor, weights: Tensor, key_sum: Tensor) -> Tensor:
    """``σ M / (σ z)`` for features ``σ [B, H, T, K]``; zeros where nothing was written."""
    divisor = (features * key_sum[:, :, None]).sum(-1, keepdim=True)
    return features @ weights / divisor.masked_fill(divisor == 0, 1)


class InfiniLayer(nn.Module):
    """Attention and feed-forward sub-layers, each after a norm and with a residual.

    Args:
        config: as of :class:`InfiniAttention`, and the feed-forward's width and dropout.
    """

    def __init__(self, config: InfiniConfig) -> None:
        check_config(self, config, "InfiniConfig")
        super().__init__()
        self.attention = InfiniAttention(config)
        self.feed_forward = FeedForward(
            config.d_model, config.d_ff, config.activation, config.dropout
        )
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)
        self.dropout = dropout_layer(config.dropout)

    def initial_memory(self, batch_size: int) -> InfiniLayerMemory:
        """A memory before the first token, in float32 or better."""
        return self.attention.initial_memory(batch_size)

    def forward(
        self, x: Tensor, memory: InfiniLayerMemory | None = None, implementation: str | None = None
    ) -> tuple[Tensor, InfiniLayerMemory]:
        """Read a segment: arguments, results and errors as in :meth:`InfiniAttention.forward`."""
        memory = check_layer(self, x, self.attention.config.d_model, memory)
        attended, memory = self.attention(self.attention_norm(x), memory, implementation)
        x = x + self.dropout(attended)
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x))), memory


def row_sizes(config: InfiniConfig) -> dict[str, tuple[int, ...]]:
    """The sizes of one row of a layer's memory."""
    heads = config.n_heads
    width = config.head_width
    return {
        "weights": (heads, width, width),
        "key_sum": (heads, width),
        "keys": (heads, config.block_length - 1, width),
        "values": (heads, config.block_length - 1, width),
        "length": (),
    }
