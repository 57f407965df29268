"""What the implementations of the delta and the sum rule are given."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memspan.devices import can_look, check_together
from memspan.errors import MemspanError
from memspan.ops.fast_weights.feature_maps import DPFP, FeatureMap


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
    """Arguments of :func:`~memspan.ops.fast_weights.rules.delta_rule`, shapes as there."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    """None: the sum rule."""
    weights: Tensor
    feature_map: FeatureMap | None
    chunking: Chunking
    log_decay: Tensor | None = None
    """None: no decay."""

    def tensors(self) -> list[Tensor]:
        """All of them, ``beta`` and ``log_decay`` where there are any."""
        given = (self.q, self.k, self.v, self.beta, self.weights, self.log_decay)
        return [tensor for tensor in given if tensor is not None]

    def features(self, x: Tensor) -> Tensor:
        """``[..., K] -> [..., F]``."""
        return x if self.feature_map is None else self.feature_map(x)

    def by_value_head(self) -> RuleInputs:
        """The same with as many heads of queries and keys as of values: each is repeated for those that
        it serves."""
        share = self.v.shape[1] // self.k.shape[1]
        if share == 1:
            return self
        q, k = (torch.repeat_interleave(x, share, 1) for x in (self.q, self.k))
        return replace(self, q=q, k=k)

    def check(self, alike: bool = True) -> None:
        """Raise :class:`MemspanError` where shapes, devices or, with ``alike``, types do not go
        together, or a decay would grow."""
        q, k, v, weights = self.q, self.k, self.v, self.weights
        strengths = {"beta": self.beta, "log_decay": self.log_decay}
        check_together(alike, q=q, k=k, v=v, weights=weights, **strengths)
        if (
            k.dim() != 4
            or v.dim() != 4
            or q.shape != k.shape
            or (k.shape[0], k.shape[2]) != (v.shape[0], v.shape[2])
        ):
            raise MemspanError(
                f"queries, keys and values do not fit together: {[*q.shape]}, {[*k.shape]}, "
                f"{[*v.shape]}; pass [B, H, T, K] twice and [B, H, T, V]"
            )
        if k.shape[1] < 1 or v.shape[1] % k.shape[1]:
            raise MemspanError(
                f"{v.shape[1]} heads of values cannot share {k.shape[1]} heads of keys evenly: pass a "
                "multiple"
            )
        for name, given in strengths.items():
            if given is not None and given.shape != v.shape[:3]:
                raise MemspanError(
                    f"{name} must be [B, H, T], {[*v.shape[:3]]}, not {[*given.shape]}"
                )
        decay = self.log_decay
        # One number costs less to look at than a mask, which counts for a single token.
        looks = decay is not None and decay.numel() and can_look(decay)
        if decay is not None and looks and decay.amax().item() > 0:
            raise MemspanError(
                f"log_decay must be at most 0, not {decay.max():.3g}: pass the logarithm of a decay in "
                "(0, 1]"
            )
        if k.shape[2] < 1:
            raise MemspanError("there are no tokens to read: pass at least one")
        if self.chunking.size < 1:
            raise MemspanError(f"the chunk size must be at least 1, not {self.chunking.size}")
        expected = (*v.shape[:2], self._n_features(), v.shape[-1])
        if weights.shape != expected:
            raise MemspanError(
                f"the memory is {[*weights.shape]}, and for these keys and values must be "
                f"{[*expected]}, [B, H, F, V]"
            )

    def _n_features(self) -> int:
        if self.feature_map is None:
            return self.k.shape[-1]
        if isinstance(self.feature_map, DPFP):
            return self.feature_map.width(self.k.shape[-1])
        return self.features(self.k[:0]).shape[-1]
