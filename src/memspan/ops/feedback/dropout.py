"""Dropout of the Feedback Transformer: drawn for a whole segment before it is read, so that the
reference and the fast paths drop the same numbers."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

RESOLUTION = 1 << 16
"""On a CPU probabilities are multiples of one in this, and four numbers share a draw of 64 bits, which
is several times faster than a draw for each."""


class Dropout(NamedTuple):
    """Masks of the numbers of a segment that dropout keeps, bool, to be multiplied by a scale; or, from
    :meth:`factors`, the factors to multiply those numbers by. None: nothing is dropped there."""

    weights: Tensor | None = None
    """Attention weights, ``[T, L, H * B, W]``, where ``W`` is the most slots that a token attends to;
    the nearest is last. Of one token in one layer ``[B, H, W]``."""
    attention: Tensor | None = None
    """Attention's addition to the residual stream, ``[L, T, B, D]``; of one token ``[B, D]``."""
    activated: Tensor | None = None
    """The feed-forward's activations, ``[L, T, B, F]``; of one token ``[B, F]``."""
    feed_forward: Tensor | None = None
    """The feed-forward's addition to the residual stream, as ``attention``."""
    weights_scale: float = 1.0
    scale: float = 1.0
    """The scale of all but the weights."""

    def factors(self, dtype: torch.dtype) -> Dropout:
        """Factors: 0 where a number is dropped, the scale where it is kept."""

        def of(kept: Tensor | None, scale: float) -> Tensor | None:
            return None if kept is None else kept.to(dtype).mul_(scale)

        return Dropout(
            of(self.weights, self.weights_scale),
            of(self.attention, self.scale),
            of(self.activated, self.scale),
            of(self.feed_forward, self.scale),
        )

    def of_token(self, layer: int, step: int, n_heads: int) -> Dropout:
        """Select the masks of one token in one layer."""

        def at(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[layer, step]

        weights = self.weights
        if weights is not None:
            weights = weights[step, layer].unflatten(0, (n_heads, -1)).transpose(0, 1)
        return Dropout(weights, at(self.attention), at(self.activated), at(self.feed_forward))


NO_DROPOUT = Dropout()


def drop(x: Tensor, factor: Tensor | None) -> Tensor:
    """``x`` times one of the factors of :class:`Dropout`, in the type of ``x``."""
    return x if factor is None else x * factor.to(x.dtype)


def draw(
    x: Tensor,
    n_layers: int,
    n_heads: int,
    d_ff: int,
    n_slots: int,
    dropout: float,
    attention_dropout: float,
) -> Dropout:
    """Draw for a segment from the random numbers of its device.

    Args:
        x: the segment, ``[B, T, D]``.
        n_layers: L; ``n_heads``: H; ``d_ff``: F.
        n_slots: ``W`` of :class:`Dropout`.
        dropout: probability that a number is dropped; 0: none is, and nothing is drawn.
        attention_dropout: the same for attention weights.
    """
    batch, n_steps, d_model = x.shape
    rows = n_heads * batch
    states = (n_layers, n_steps, batch, d_model)
    weights, weights_scale = _draw(x, (n_steps, n_layers, rows, n_slots), attention_dropout)
    attention, scale = _draw(x, states, dropout)
    activated, _ = _draw(x, (*states[:-1], d_ff), dropout)
    feed_forward, _ = _draw(x, states, dropout)
    return Dropout(weights, attention, activated, feed_forward, weights_scale, scale)


def _draw(like: Tensor, shape: tuple[int, ...], probability: float) -> tuple[Tensor | None, float]:
    """Draw a mask of the numbers that are kept (None: all are), and find their scale."""
    if not probability:
        return None, 1.0
    # A graph of torch.compile cannot contain random_.
    if like.device.type != "cpu" or torch.compiler.is_compiling():
        kept = like.new_empty(shape, dtype=torch.bool).bernoulli_(1 - probability)
        return kept, 1 / (1 - probability)
    dropped = min(max(round(probability * RESOLUTION), 1), RESOLUTION - 1)
    n = math.prod(shape)
    bits = like.new_empty(-(-n // 4), dtype=torch.int64).random_(-(2**63), None)
    kept = bits.view(torch.int16)[:n].view(shape) >= dropped - RESOLUTION // 2
    return kept, RESOLUTION / (RESOLUTION - dropped)
