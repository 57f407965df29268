"""Every implementation against ``implementation="reference"``, which is plain autograd: what needs more
than one backward works with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from architectures import Case, implementations
from memspan.errors import MemspanError
from readings import every_case, outcome, some_memory, text


@every_case
def test_every_implementation_is_the_reference(case: Case) -> None:
    """Losses, memory and the gradients of every parameter and of the memory before; rows of different
    ages."""
    model = case.model()
    given = model, some_memory(model, 3), text(3, 9), text(3, 9, 1)
    expected = outcome(*given, {"implementation": "reference"})
    for implementation in (None, *implementations(model.backbone)):
        for name, found in outcome(*given, {"implementation": implementation}).items():
            # A gradient may be a sum of which rounding is all that is left.
            scale = max(1.0, float(expected[name].abs().max())) if found.numel() else 1.0
            torch.testing.assert_close(
                found,
                expected[name],
                rtol=0,
                atol=1e-9 * scale,
                msg=lambda why, at=(implementation, name): f"{at}: {why}",
            )
    with pytest.raises(MemspanError, match="no implementation 'quick': use "):
        model(text(1, 2), implementation="quick")


@every_case
def test_double_backward(case: Case) -> None:
    """The derivative of a squared gradient, along some direction, is the numeric one."""
    backbone = case.model().backbone
    memory = backbone.initial_memory(1)
    x = torch.randn(1, 2, backbone.config.d_model, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)

    def run(x: Tensor) -> Tensor:
        return (backbone(x, memory, implementation="reference").hidden * weight).sum()

    assert torch.autograd.gradgradcheck(run, (x,), fast_mode=True)
