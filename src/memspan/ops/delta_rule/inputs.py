"""What the implementations of the delta and the sum rule are given."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from memspan.errors import MemspanError
from memspan.ops.delta_rule.feature_maps import DPFP, FeatureMap


@dataclass(frozen=True)
class Chunking:
    """How the work is divided; results do not depend on it."""

    size: int = 32
    """Tokens per chunk. The loops over single tokens ignore it."""
    recompute: bool = False
    """Store fewer memories for the backward pass and recompute the others: one every 16 chunks
    (compiled: every 256 tokens instead of 64). Chunked training then takes a third longer."""


@dataclass(frozen=True)
class RuleInputs:
    """Arguments of :func:`~memspan.ops.delta_rule.rules.delta_rule`, shapes as there."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    """None: the sum rule."""
    weights: Tensor
    feature_map: FeatureMap | None
    chunking: Chunking

    def tensors(self) -> list[Tensor]:
        """All of them, ``beta`` where there is one."""
        given = (self.q, self.k, self.v, self.beta, self.weights)
        return [tensor for tensor in given if tensor is not None]

    def features(self, x: Tensor) -> Tensor:
        """``[..., K] -> [..., F]``."""
        return x if self.feature_map is None else self.feature_map(x)

    def check(self) -> None:
        """Raise :class:`MemspanError` where shapes do not fit together."""
        q, k, v, beta, weights = self.q, self.k, self.v, self.beta, self.weights
        if q.shape != k.shape or k.shape[:3] != v.shape[:3]:
            raise MemspanError(
                f"queries, keys and values do not fit together: {[*q.shape]}, {[*k.shape]}, "
                f"{[*v.shape]}; pass [B, H, T, K] twice and [B, H, T, V]"
            )
        if beta is not None and beta.shape != k.shape[:3]:
            raise MemspanError(f"beta must be [B, H, T], {[*k.shape[:3]]}, not {[*beta.shape]}")
        if k.shape[2] < 1:
            raise MemspanError("there are no tokens to read: pass at least one")
        if self.chunking.size < 1:
            raise MemspanError(f"the chunk size must be at least 1, not {self.chunking.size}")
        expected = (*k.shape[:2], self._n_features(), v.shape[-1])
        if weights.shape != expected:
            raise MemspanError(
                f"the memory is {[*weights.shape]}, and for these keys and values must be "
                f"{[*expected]}, [B, H, F, V]"
            )

    def _n_features(self) -> int:
        if isinstance(self.feature_map, DPFP):
            return self.feature_map.width(self.k.shape[-1])
        return self.features(self.k[:0]).shape[-1]
