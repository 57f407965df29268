"""The Feedback Transformer's attention (Fan et al. 2020).

A token attends to the memory vectors of the ``S`` tokens before it, one of each. With ``d = 1 .. S``
the distance back, ``k`` and ``v`` the keys and values of the memory vectors::

    A_d = ( (q + u) . k_d  +  q . R_d  +  S_d ) / sqrt(K)        attention = softmax_d(A) v

A head may learn its span (Sukhbaatar et al. 2019, arXiv 1905.07799): weights are multiplied by ``m_d``,
which falls from 1 to 0 over a ramp, and divided by their sum.

The layer around it, and what a token writes, are ``models/feedback/layer.py``; the loop over tokens,
in plain autograd, is ``Feedback`` in ``models/feedback/model.py``: together the reference.
``recurrence.py`` is the whole loop as one autograd function.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memspan.errors import MemspanError
from memspan.ops.implementations import check_together

EPSILON = 1e-8
"""Added to the sum of weights that a learned span divides by."""


class Distances(NamedTuple):
    """Terms that depend on the distance alone; row ``d - 1`` is of distance ``d``, ``P >= S`` rows."""

    keys: Tensor
    """``R``, ``[P, H, K]``."""
    scores: Tensor
    """``S_d``, ``[P, H]``."""
    span_mask: Tensor | None = None
    """``m``, ``[H, P]``, from :func:`span_mask` (None: 1 everywhere)."""


def feedback_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    distances: Distances,
    content_bias: Tensor,
    visible: Tensor,
    factors: Tensor | None = None,
    attention_weights: list[Tensor] | None = None,
) -> Tensor:
    """Attention of one token per row (Fan et al. 2020).

    Args:
        q: queries ``[B, H, K]``.
        k: keys ``[B, H, S, K]`` of the tokens before, newest last; ``v``: their values.
        distances: the terms ``R``, ``S`` and ``m``.
        content_bias: ``u``, ``[H, K]``.
        visible: bool ``[B, S]``, true where there is a token. A row without any gets zero.
        factors: of dropout: what the weights of the last ``W <= S`` slots are multiplied by,
            ``[B, H, W]``; the slots before are not visible.
        attention_weights: a list that receives the weights ``[B, H, S]``, before dropout and without
            gradient; for inspection.

    Returns:
        ``[B, H, K]``; under autocast, which rounds its products, of the type that it chooses.

    Raises:
        MemspanError: shapes or devices do not go together.
    """
    _check(q, k, v, distances, content_bias, visible)
    slots, width = k.shape[2:]
    # Farthest first, as the keys are.
    position_keys = distances.keys[:slots].flip(0)
    position_scores = distances.scores[:slots].flip(0)
    scores = torch.einsum("bhk,bhsk->bhs", q + content_bias, k)
    scores = scores + torch.einsum("bhk,shk->bhs", q, position_keys) + position_scores.t()
    scores = scores * width**-0.5
    # The lowest number, not -inf: a row without tokens must not become NaN.
    scores = scores.masked_fill(~visible[:, None], torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    if distances.span_mask is not None:
        weights = weights * distances.span_mask[:, :slots].flip(1)
        weights = weights / (weights.sum(-1, keepdim=True) + EPSILON)
    weights = weights * visible.any(-1)[:, None, None]
    if attention_weights is not None:
        attention_weights.append(weights.detach())
    if factors is not None:
        weights = weights * F.pad(factors.to(weights.dtype), (slots - factors.shape[-1], 0))
    return torch.einsum("bhs,bhsk->bhk", weights, v)


def _check(
    q: Tensor, k: Tensor, v: Tensor, distances: Distances, content_bias: Tensor, visible: Tensor
) -> None:
    check_together(False, q=q, k=k, v=v, R=distances.keys, S=distances.scores, u=content_bias)
    if q.dim() != 3 or k.dim() != 4 or k.shape != (*q.shape[:2], k.shape[2], q.shape[2]):
        raise MemspanError(
            f"a query [B, H, K] and keys [B, H, S, K] do not fit together: {[*q.shape]}, {[*k.shape]}"
        )
    if v.shape != k.shape:
        raise MemspanError(
            f"values must be as many and as wide as keys: {[*v.shape]}, {[*k.shape]}"
        )
    heads = q.shape[1:]
    slots = k.shape[2]
    rows = len(distances.keys)
    if distances.keys.shape[1:] != heads or distances.scores.shape != (rows, heads[0]):
        raise MemspanError(
            f"distances must have keys [P, {heads[0]}, {heads[1]}] and scores [P, {heads[0]}], not "
            f"{[*distances.keys.shape]} and {[*distances.scores.shape]}"
        )
    if rows < slots:
        raise MemspanError(
            f"{slots} keys need as many rows of distances, not {rows}: leave out the farthest"
        )
    if content_bias.shape != heads:
        raise MemspanError(f"content_bias must be {[*heads]}, [H, K], not {[*content_bias.shape]}")
    if visible.dtype != torch.bool or visible.shape != (q.shape[0], slots):
        raise MemspanError(
            f"visible must be bool [B, S], {[q.shape[0], slots]}, not {[*visible.shape]}"
        )


def span_mask(spans: Tensor, ramp: int, n_distances: int) -> Tensor:
    """``m_d = clamp((R + z - (d - 1)) / R, 0, 1)`` for the distances ``d = 1 .. P``.

    Args:
        spans: ``z``, in tokens, ``[H]``.
        ramp: ``R``, tokens over which ``m`` falls from 1 to 0, at least 1.
        n_distances: ``P``.

    Returns:
        ``[H, P]``, in the order of the position tables. It is 1 for the nearest token.
    """
    before = torch.arange(n_distances, device=spans.device)
    return ((ramp + spans[:, None] - before) / ramp).clamp(0, 1)
