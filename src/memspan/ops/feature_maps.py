"""Feature maps of fast weights and linear attention: ``phi: [..., K] -> [..., F]``, ``F`` as listed.

| map | F | from |
| --- | --- | --- |
| :func:`dpfp` | ``2 K nu`` | Schlag et al. 2021, eq. 37 and 38 |
| :func:`elu_plus_one` | ``K`` | Katharopoulos et al. 2020, arXiv 2006.16236, eq. 7 |
| :func:`favor` | ``2 m`` | Choromanski et al. 2021, arXiv 2009.14794, lemma 1, hyperbolic form |
| softmax | ``K`` | ``softmax(k)`` over the key's own entries |
| identity | ``K`` | linear attention without a map |

All but the identity are non-negative, so that their sums can serve as denominators.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

FAVOR_FLOOR = 1e-4
"""Added to every exponential, as the Performer's authors do: no feature underflows to zero."""


def dpfp(x: Tensor, nu: int = 1) -> Tensor:
    """Deterministic parameter-free projection: ``[..., K] -> [..., 2 K nu]``.

    With ``r = relu([x, -x])`` the map is ``[r * roll(r, 1), ..., r * roll(r, nu)]``: of each pair
    ``(x_i, -x_i)`` at most one survives, so at least half the products of any roll are zero.

    Differs from the paper: its formula pairs entry ``j`` with ``j + i``, its public code, as here,
    with ``j - i``. The products are the same ones in another order.

    Args:
        x: keys or queries.
        nu: number of rolls, ``1 .. 2K - 1``; beyond, pairs come twice.
    """
    apply: Any = _DPFP.apply
    return apply(x, nu)


class _DPFP(torch.autograd.Function):
    """Keeps ``x`` only. Plain autograd would keep ``r`` and every rolled copy of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, nu: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.nu = nu
        r = _both_signs(x)
        products = [r * r.roll(i, -1) for i in range(1, nu + 1)]
        return products[0] if nu == 1 else torch.cat(products, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        r = _both_signs(x)
        d_r: Tensor | None = None
        for i, g in enumerate(grad.chunk(ctx.nu, -1), 1):
            both = torch.addcmul((g * r).roll(-i, -1), g, r.roll(i, -1))
            d_r = both if d_r is None else d_r + both
        assert d_r is not None
        up, down = (d_r * (r > 0)).chunk(2, -1)
        return up - down, None


def _both_signs(x: Tensor) -> Tensor:
    return torch.cat([x, -x], -1).relu_()


def elu_plus_one(x: Tensor) -> Tensor:
    """``elu(x) + 1``: ``[..., K] -> [..., K]``, positive."""
    return F.elu(x) + 1


def favor(x: Tensor, projection: Tensor) -> Tensor:
    """FAVOR+ positive random features: ``[..., K] -> [..., 2 m]``.

    ``exp(-|x|^2 / 2) [exp(x P), exp(-x P)] / sqrt(2 m)``: in expectation over ``P``,
    ``favor(q) . favor(k) = exp(q . k)``.

    Args:
        x: keys or queries.
        projection: ``P [K, m]``, from :func:`orthogonal_projection`.
    """
    projected = x @ projection
    norm = x.square().sum(-1, keepdim=True) / 2
    features = torch.cat([projected - norm, -projected - norm], -1).exp() + FAVOR_FLOOR
    return features * (2 * projection.shape[1]) ** -0.5


def orthogonal_projection(
    width: int, n_features: int, generator: torch.Generator | None = None
) -> Tensor:
    """``P [K, m]`` of :func:`favor`: columns like Gaussian vectors, orthogonal in blocks of ``K``."""
    blocks = []
    for _ in range(-(-n_features // width)):
        gaussian = torch.randn(width, width, generator=generator)
        q, r = torch.linalg.qr(gaussian)
        # Without the signs QR's own convention would decide where the vectors point.
        blocks.append(q * r.diagonal().sign())
    lengths = torch.randn(n_features, width, generator=generator).norm(dim=1)
    return torch.cat(blocks, 1)[:, :n_features] * lengths


def sum_to_one(features: Tensor, epsilon: float) -> Tensor:
    """``phi / (sum(phi) + epsilon)``, the paper's sum normalisation (section 4.2): same shape."""
    return features / (features.sum(-1, keepdim=True) + epsilon)
