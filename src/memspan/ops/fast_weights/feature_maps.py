"""Feature maps of fast weights and linear attention: ``phi: [..., K] -> [..., F]``, ``F`` as listed.

| map | F | from |
| --- | --- | --- |
| :func:`dpfp` | ``2 K nu`` | Schlag et al. 2021, section 5.4, eq. 37 |
| :func:`elu_plus_one` | ``K`` | Katharopoulos et al. 2020, arXiv 2006.16236, eq. 7 |
| :func:`favor` | ``2 m`` | Choromanski et al. 2021, arXiv 2009.14794, lemma 1, hyperbolic form |
| softmax | ``K`` | ``softmax(k)`` over the key's own entries |
| identity | ``K`` | linear attention without a map |

All but the identity are non-negative, so that their sums can serve as denominators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memspan.errors import MemspanError
from memspan.ops.first_derivatives import apply, first_derivatives_only
from memspan.ops.implementations import check_together

FAVOR_FLOOR = 1e-4
"""Added to every exponential, as the Performer's authors do: no feature underflows to zero."""


def dpfp(x: Tensor, nu: int = 1, epsilon: float | None = None) -> Tensor:
    """Deterministic parameter-free projection (section 5.4, eq. 37): ``[..., K] -> [..., 2 K nu]``.

    With ``r = relu([x, -x])`` the map is ``[r * roll(r, 1), ..., r * roll(r, nu)]``: of each pair
    ``(x_i, -x_i)`` at most one survives, so at least half the products of any roll are zero.

    Differs from the paper: its formula pairs entry ``j`` with ``j + i``, its public code, as here,
    with ``j - i``. The products are the same ones in another order.

    Args:
        x: keys or queries.
        nu: number of rolls: ``1 .. 2K - 1`` in the paper, and ``2K``, which adds squares.
        epsilon: divide features by their sum plus this, like :func:`sum_to_one` but in the same pass
            (None: do not).

    Raises:
        MemspanError: ``nu`` is below 1 or above ``2K``.
    """
    DPFP(nu).width(x.shape[-1])
    if not (torch.is_grad_enabled() and x.requires_grad):
        return _dpfp(x, nu, epsilon)[0]
    features: Tensor = apply(_DPFP, x, nu, epsilon)
    return features


@dataclass(frozen=True)
class DPFP:
    """:func:`dpfp` with its options, as a value that callers can recognise."""

    nu: int = 1
    epsilon: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return dpfp(x, self.nu, self.epsilon)

    def reference(self, x: Tensor) -> Tensor:
        """The formula in plain autograd."""
        self.width(x.shape[-1])
        r = torch.cat([x, -x], -1).relu()
        features = torch.cat([r * r.roll(i, -1) for i in range(1, self.nu + 1)], -1)
        return features if self.epsilon is None else sum_to_one(features, self.epsilon)

    def width(self, head_width: int) -> int:
        """Features of a key of width ``head_width``.

        Raises:
            MemspanError: ``nu`` is below 1 or above ``2K``.
        """
        if not 1 <= self.nu <= 2 * head_width:
            raise MemspanError(
                f"nu must lie in 1 .. {2 * head_width}, twice the key's width, not {self.nu}"
            )
        return 2 * head_width * self.nu


def in_plain_autograd(feature_map: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same map without custom functions, for double backward and ``torch.func``."""
    return feature_map.reference if isinstance(feature_map, DPFP) else feature_map


def _dpfp(x: Tensor, nu: int, epsilon: float | None) -> tuple[Tensor, Tensor | None]:
    """The features, and their divisors where ``epsilon`` is given."""
    r = _rollable(x, nu)
    now = r[..., nu:]
    width = 2 * x.shape[-1]
    products = [now * r[..., nu - i : nu - i + width] for i in range(1, nu + 1)]
    features = products[0] if nu == 1 else torch.cat(products, -1)
    if epsilon is None:
        return features, None
    sums = features.sum(-1, keepdim=True).add_(epsilon)
    return features.div_(sums), sums


class _DPFP(torch.autograd.Function):
    """Saves ``x``, the features and their sums; plain autograd would save every rolled copy too.

    ``r`` is built with its last ``nu`` entries repeated in front: a roll is then a view.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, nu: int, epsilon: float | None) -> Tensor:
        features, sums = _dpfp(x, nu, epsilon)
        ctx.nu = nu
        ctx.save_for_backward(x, sums, None if sums is None else features)
        return features

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, sums, features = ctx.saved_tensors
        if sums is not None:
            grad = (grad - (grad * features).sum(-1, keepdim=True)).div_(sums)
        nu = ctx.nu
        width = 2 * x.shape[-1]
        r = _rollable(x, nu)
        d_r = torch.zeros_like(r)
        for i, g in enumerate(grad.split(width, -1), 1):
            before = slice(nu - i, nu - i + width)
            d_r[..., nu:].addcmul_(g, r[..., before])
            d_r[..., before].addcmul_(g, r[..., nu:])
        # The entries in front are copies of the last ones.
        d_r[..., -nu:] += d_r[..., :nu]
        positive, negative = d_r[..., nu:].chunk(2, -1)
        relu_backward = torch.ops.aten.threshold_backward
        return relu_backward(positive, x, 0).sub_(relu_backward(negative, -x, 0)), None, None


def _rollable(x: Tensor, nu: int) -> Tensor:
    """``relu([x, -x])`` with a copy of its last ``nu`` entries in front."""
    width = x.shape[-1]
    r = x.new_empty(*x.shape[:-1], nu + 2 * width)
    r[..., nu : nu + width] = x
    r[..., nu + width :] = -x
    r[..., :nu] = r[..., -nu:]
    return r.relu_()


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

    Raises:
        MemspanError: the projection is of keys of another width, or on another device.
    """
    check_together(x=x, projection=projection)
    if projection.dim() != 2 or len(projection) != x.shape[-1]:
        raise MemspanError(
            f"the projection must be [K, m] for keys of width {x.shape[-1]}, not "
            f"{[*projection.shape]}"
        )
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
        # Otherwise QR's sign convention would decide where the vectors point.
        blocks.append(q * r.diagonal().sign())
    lengths = torch.randn(n_features, width, generator=generator).norm(dim=1)
    return torch.cat(blocks, 1)[:, :n_features] * lengths


def sum_to_one(features: Tensor, epsilon: float) -> Tensor:
    """``phi / (sum(phi) + epsilon)``, the paper's sum normalisation (section 4.2): same shape."""
    return features / (features.sum(-1, keepdim=True) + epsilon)
