"""The rules of fast weights, random tensors for them, and the equations entry by entry."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from golden import assert_same
from memspan.ops.fast_weights import compiled
from memspan.ops.fast_weights.rules import delta_rule, sum_rule

RULES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "delta": delta_rule,
    "gated": delta_rule,
    "sum": sum_rule,
}


every_rule = pytest.mark.parametrize("rule", RULES)


COMPILES = pytest.param(
    "compiled",
    marks=pytest.mark.skipif(not compiled.available(torch.zeros(())), reason="no C compiler"),
)


fast = pytest.mark.parametrize("implementation", ["chunked", COMPILES])


every = pytest.mark.parametrize("implementation", ["reference", "chunked", COMPILES])


def inputs(
    rule: str,
    length: int,
    *,
    batch: int = 2,
    n_heads: int = 3,
    features: int = 6,
    width: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Random tensors under the operations' own names, from a memory that is not empty."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    heads = (batch, n_heads, length)
    t = {
        "q": draw(*heads, features),
        # Longer keys than this would make the delta rule diverge: beta |k|^2 < 2.
        "k": torch.nn.functional.normalize(draw(*heads, features), dim=-1),
        "v": draw(*heads, width),
        "weights": draw(batch, n_heads, features, width),
    }
    if rule == "gated":
        # All of the memory, almost all, or almost nothing of it.
        t["log_decay"] = -(4 * draw(*heads) - 4).exp()
        t["log_decay"][:, :, 8::7] = 0.0
    if rule != "sum":
        t["beta"] = draw(*heads).sigmoid()
        # The ends of its range, where a division by beta would fail.
        t["beta"][:, :, ::5] = 0.0
        t["beta"][:, :, 1::5] = 1.0
    return {name: tensor.to(dtype) for name, tensor in t.items()}


def with_gradient(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.clone().requires_grad_() for name, t in tensors.items()}


def by_hand(t: dict[str, Tensor], squash: Callable[[float], float] = lambda x: x) -> list[Tensor]:
    """The equations at the top of the module, entry by entry."""
    batch, n_heads, length, features = t["q"].shape
    width = t["v"].shape[-1]
    q, k, v, weights = (t[name].tolist() for name in ("q", "k", "v", "weights"))
    out = torch.zeros_like(t["v"])
    for b, h in itertools.product(range(batch), range(n_heads)):
        w = weights[b][h]
        for n in range(length):
            if "log_decay" in t:
                decay = math.exp(t["log_decay"][b, h, n])
                w[:] = [[decay * x for x in row] for row in w]
            for j in range(width):
                change = v[b][h][n][j]
                if "beta" in t:
                    change -= sum(k[b][h][n][i] * w[i][j] for i in range(features))
                    change *= t["beta"][b, h, n].item()
                for i in range(features):
                    w[i][j] = squash(w[i][j] + k[b][h][n][i] * change)
                out[b, h, n, j] = sum(q[b][h][n][i] * w[i][j] for i in range(features))
    return [out, torch.tensor(weights, dtype=torch.float64)]


def assert_all_same(ours: tuple[Tensor, ...], theirs: list[Tensor], tolerance: float) -> None:
    for name, a, b in zip(("y", "weights"), ours, theirs, strict=True):
        assert_same(a, b, tolerance, name)
