"""``implementation="reference"`` is plain autograd: what needs more than one backward works with it."""

from __future__ import annotations

import torch
from torch import Tensor

from architectures import Case
from golden import assert_same
from readings import every_case, some_memory, text

LENGTH = 4


@every_case
def test_reference_gives_the_same(case: Case) -> None:
    model = case.model()
    memory = some_memory(model, 2).detach()
    out, expected = (
        model(text(2, LENGTH), memory, **options)
        for options in ({"implementation": "reference"}, {})
    )
    assert_same(out.logits, expected.logits, 1e-9, "logits")


@every_case
def test_double_backward(case: Case) -> None:
    """The derivative of a squared gradient, along some direction, is the numeric one."""
    backbone = case.model().backbone
    memory = backbone.initial_memory(1)
    x = torch.randn(1, 3, backbone.config.d_model, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)

    def run(x: Tensor) -> Tensor:
        return (backbone(x, memory, implementation="reference").hidden * weight).sum()

    assert torch.autograd.gradgradcheck(run, (x,), fast_mode=True)
