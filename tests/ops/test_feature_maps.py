"""Feature maps against their formulas. DPFP's gradient is tested where the rules apply it."""

from __future__ import annotations

import math

import pytest
import torch

from golden import assert_same
from memspan.ops.fast_weights.feature_maps import (
    FAVOR_FLOOR,
    dpfp,
    elu_plus_one,
    favor,
    orthogonal_projection,
    sum_to_one,
)


@pytest.mark.parametrize("nu", [1, 2, 3, 7])
def test_dpfp_is_the_formula(nu: int) -> None:
    """Entry ``(i - 1) 2K + j`` is ``r_j r_(j - i)``, with ``r = relu([k, -k])``."""
    width = 4
    x = torch.randn(5, 4).double()
    out = dpfp(x, nu)
    assert out.shape == (5, 2 * width * nu)
    for row, found in zip(x.tolist(), out.tolist(), strict=True):
        r = [max(0.0, a) for a in [*row, *(-a for a in row)]]
        expected = [r[j] * r[j - i] for i in range(1, nu + 1) for j in range(2 * width)]
        assert found == pytest.approx(expected, abs=1e-15)


def test_elu_plus_one_is_the_formula() -> None:
    given = [-3.0, -0.1, 0.0, 2.5]
    found = elu_plus_one(torch.tensor(given, dtype=torch.float64)).tolist()
    assert found == pytest.approx([a + 1 if a > 0 else math.exp(a) for a in given])


def test_favor_is_the_formula() -> None:
    x = torch.randn(3, 4).double()
    projection = torch.randn(4, 5).double()
    out = favor(x, projection)
    assert out.shape == (3, 10)
    for row, found in zip(x, out.tolist(), strict=True):
        exponents = [
            sign * row @ column - row @ row / 2 for sign in (1, -1) for column in projection.T
        ]
        expected = [(math.exp(each) + FAVOR_FLOOR) / math.sqrt(10) for each in exponents]
        assert found == pytest.approx(expected, rel=1e-12)


def test_projection_is_orthogonal_in_blocks_with_gaussian_lengths() -> None:
    projection = orthogonal_projection(16, 40, torch.Generator().manual_seed(0))
    assert projection.shape == (16, 40)
    products = projection.t() @ projection
    for start in (0, 16, 32):
        block = products[start : start + 16, start : start + 16]
        assert (block - block.diagonal().diag()).abs().max() < 1e-4
    many = orthogonal_projection(16, 4096, torch.Generator().manual_seed(0))
    assert many.square().sum(0).mean().item() == pytest.approx(16, rel=0.05)
    assert many.mean().item() == pytest.approx(0, abs=0.02)


def test_sum_to_one_and_its_epsilon() -> None:
    features = torch.rand(3, 5).double()
    assert_same(sum_to_one(features, 0.0).sum(-1), torch.ones(3).double(), 1e-12, "sum")
    assert not sum_to_one(torch.zeros(2, 5), 1e-6).any()
