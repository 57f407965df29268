"""What the loops of the Feedback Transformer's fast path share: folded weights, what forward saves for
backward, and the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Folded:
    """All weights of a stack, each the layers' one above the other, with the constant parts folded in.

    Folded are: each norm's gain and bias, into the product that follows; ``1 / sqrt(K)`` and ``u``,
    into the query; ``u . R_d``, out of the position scores; biases that follow a product with a
    residual sum, as a last row that meets a constant one. ``G`` is 1 where all layers share keys and
    values, else ``L``.
    """

    query: Tensor
    """``[L, H, D, K]``."""
    query_bias: Tensor
    """``[L, H, 1, K]``."""
    position_keys: Tensor
    """``[L, H, K, S]``, farthest first."""
    position_scores: Tensor
    """``[L, H, 1, S]``, farthest first."""
    output: Tensor
    """``[L, H * K + 1, D]``."""
    inner: Tensor
    """``[L, D, F]``."""
    inner_bias: Tensor
    """``[L, F]``."""
    outer: Tensor
    """``[L, F + 1, D]``."""
    memory: Tensor
    """Keys, then values: ``[D, 2 * G * H * K]``."""
    memory_bias: Tensor
    """``[2 * G * H * K]``."""
    mix: Tensor
    """Weights of a token's states in its memory vector, ``[L + 1]``."""
    norms_memory: bool = False
    """Whether memory vectors are normalised before the projections."""

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "norms_memory"}

    @classmethod
    def of(cls, tensors: Sequence[Tensor], norms_memory: bool) -> Folded:
        """From the values of :meth:`tensors`."""
        names = [f.name for f in fields(cls) if f.name != "norms_memory"]
        named: dict[str, Any] = dict(zip(names, tensors, strict=True))
        return cls(**named, norms_memory=norms_memory)

    @property
    def n_groups(self) -> int:
        """Groups of layers that have keys and values of their own."""
        n_heads, _, width = self.query.shape[1:]
        return self.memory.shape[1] // (2 * n_heads * width)


@dataclass(frozen=True)
class Call:
    """The memory before a segment, and how the segment is read."""

    n_old: int
    """Slots of memory before the first token."""
    span: int
    activation: str
    eps: float
    additive_mask: Tensor | None = None
    """Added to the scores of old slots, ``[B, O]``; None if all rows have all of them."""
    has_memory: Tensor | None = None
    """Likewise: 1 for a row that has any old slot, else 0, ``[B]``."""


@dataclass
class Saved:
    """What forward saves for backward; time first, heads before rows."""

    states: Tensor
    """Embedding and layers' outputs, ``[L + 1, T, B, D]``."""
    middles: Tensor
    """Between the sub-layers, ``[L, T, B, D]``."""
    queries: Tensor
    """``[T, L, H * B, K]``."""
    attended: Tensor
    """What the heads read, and a one: ``[L, T, B, H * K + 1]``."""
    activated: Tensor
    """Inside the feed-forward, and a one: ``[L, T, B, F + 1]``."""
    before: Tensor
    """The same before gelu; relu needs no other than ``activated``."""
    vectors: Tensor
    """``[T, B, D]``."""
    kv: Tensor
    """``[2, G, H * B, O + T, K]``; compiled, ``[2, G, H * B, K, O + T]``."""
    memory_moments: Tensor
    """Mean and ``rstd`` of memory vectors, where they are normalised, ``[T, 2, B]``."""
    mean: list[list[Any]] | None = None
    """Of each norm and step, ``[B, 1]``; likewise ``rstd``."""
    rstd: list[list[Any]] | None = None
    moments: Tensor | None = None
    """The same where compiled, ``[L, T, 4, B]``."""
    probabilities: Any = None
    """Attention weights, for each step ``[L, H * B, 1, n]``; compiled, all in one tensor."""


@dataclass
class Gradients:
    """What the loop backwards finds; ``d`` of what :class:`Saved` has, in its layouts."""

    states: Tensor
    """Of the layers' outputs only, ``[L, T, B, D]``."""
    middles: Tensor
    inner: Tensor
    """Before the activation, ``[L, T, B, F]``."""
    query: Tensor
    """``[L, T, B, H * K]``."""
    first: Tensor
    """Of the input, ``[T, B, D]``."""
    mixed: Tensor
    """Of the memory vectors, ``[T, B, D]``."""
    projected: Tensor
    """Of their keys and values, ``[T, B, 2 * G * H * K]``."""
    kv: Tensor
    """``[2, G, H * B, O + T, K]``."""
    position_keys: Tensor
    """``[L, H, K, S]``."""
    position_scores: Tensor
    """``[L, H, 1, S]``."""


def mask_of_old_slots(length: Tensor, n_old: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``additive_mask`` and ``has_memory`` of :class:`Call`."""
    absent = torch.arange(n_old, device=length.device) < (n_old - length)[:, None]
    # Large enough that its exponential is zero, and finite: see `attend`.
    additive_mask = torch.zeros_like(absent, dtype=dtype)
    additive_mask.masked_fill_(absent, torch.finfo(dtype).min / 4)
    return additive_mask, (length > 0).to(dtype)


def by_slot(kv: Tensor, batch: int) -> Tensor:
    """``[2, G, H * B, N, K]`` viewed as ``[N, B, 2, G, H, K]``."""
    return kv.unflatten(2, (-1, batch)).permute(4, 3, 0, 1, 2, 5)
