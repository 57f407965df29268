"""The associative memory of one layer (Rodkin et al. 2024, arXiv 2407.04841), as in its authors' code.

A matrix ``A`` and a sum of keys ``z``. Tokens ``x`` read before the layer, and the layer's outputs at
the memory tokens, ``m``, are written after it, with ``φ = DPFP`` of ν = 3::

    y = φ(W_q x) A / (φ(W_q x) z + ε)
    β = sigmoid(W_β m + b)        k = φ(W_k m)        v = W_v m
    A' = A + Σ k^T β (v - k A / (k z + ε))
    z' = z + Σ γ k        γ = 1 - (k z + ε) / (|k|^2 + ε), between 0 and 1, without gradient

so that a key that was written before does not count again in ``z``; the first block's have γ = 1. All
memory tokens of a block are written at once. The divisors may be small, so that under autocast these
products, too, are in float32.
"""

from __future__ import annotations

from torch import Tensor, nn

from memspan.ops.fast_weights.feature_maps import DPFP
from memspan.ops.implementations import without_autocast

EPSILON = 1e-5
"""In both divisors."""
NU = 3
"""Rolls of the feature map."""


class AssociativeMemory(nn.Module):
    """Queries, keys, values and strengths of one layer's associative memory.

    In a model, values begin at zero, as in the authors' code.
    """

    def __init__(self, d_model: int, d_memory: int) -> None:
        super().__init__()
        self.query = nn.Linear(d_model, d_memory, bias=False)
        self.key = nn.Linear(d_model, d_memory, bias=False)
        self.value = nn.Linear(d_model, d_model, bias=False)
        self.beta = nn.Linear(d_model, 1)

    def read(
        self, x: Tensor, weights: Tensor, key_sum: Tensor, first: Tensor, plain: bool
    ) -> Tensor:
        """Read with ``x [B, T, D]``, to ``[B, T, D]``, from ``weights [B, F, D]`` and
        ``key_sum [B, F]``.

        Args:
            first: bool ``[B]``, true where nothing was written before: zeros are read.
            plain: by the reference.
        """
        with without_autocast(x):
            features = feature_map(self.query(x).to(weights.dtype), plain)
            found = features @ weights / overlap(features, key_sum, first)
            return found.to(x.dtype)

    def write(
        self, x: Tensor, weights: Tensor, key_sum: Tensor, first: Tensor, plain: bool
    ) -> tuple[Tensor, Tensor]:
        """The memory after the layer's outputs at the memory tokens, ``x [B, M, D]``, are written.
        Other arguments: as in :meth:`read`."""
        with without_autocast(x):
            key = feature_map(self.key(x).to(weights.dtype), plain)
            divisor = overlap(key, key_sum, first)
            value = self.value(x).to(weights.dtype) - key @ weights / divisor
            beta = self.beta(x).to(weights.dtype).sigmoid()
            weights_after = weights + (key * beta).mT @ value
            new = 1 - divisor / (key.square().sum(-1, keepdim=True) + EPSILON)
            new = new.clamp(0, 1).detach().masked_fill(first[:, None, None], 1)
            return weights_after, key_sum + (key * new).sum(1)


def overlap(features: Tensor, key_sum: Tensor, first: Tensor) -> Tensor:
    """``k z + ε``, ``[B, T, 1]``; 1 where the memory is empty, by which its zeros are not amplified."""
    divisor = (features * key_sum[:, None]).sum(-1, keepdim=True) + EPSILON
    return divisor.masked_fill(first[:, None, None], 1)


def feature_map(x: Tensor, plain: bool) -> Tensor:
    """``φ``: ``[..., K] -> [..., 6 K]``."""
    dpfp = DPFP(NU)
    return dpfp.reference(x) if plain else dpfp(x)
