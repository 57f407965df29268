"""The short convolution against torch's own, with gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from golden import assert_same
from memspan.ops import convolution as module
from memspan.ops.convolution import IMPLEMENTATIONS, short_convolution


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 63, 100])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_it_is_a_causal_convolution_of_each_channel(
    implementation: str, length: int, taps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own over the inputs before and the segment's; with gradients, over several blocks."""
    monkeypatch.setattr(module, "CACHE_BYTES", 2 * 5 * 8 * 7)
    shapes = {"x": (2, length, 5), "weight": (5, taps), "before": (2, taps - 1, 5)}
    given = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    theirs, ours = ({n: t.clone().requires_grad_() for n, t in given.items()} for _ in range(2))
    padded = torch.cat([theirs["before"], theirs["x"]], 1)
    y = F.conv1d(padded.mT, theirs["weight"][:, None], groups=5).mT
    expected = (y, padded[:, length:])
    found = short_convolution(**ours, implementation=implementation)
    for a, b in zip(found, expected, strict=True):
        assert_same(a, b, 1e-13, "output")
    for outputs in (expected, found):
        sum(x.sin().sum() for x in outputs).backward()
    for name, tensor in ours.items():
        assert_same(tensor.grad, theirs[name].grad, 1e-12, f"gradient of {name}")
