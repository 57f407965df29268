"""Every implementation against ``implementation="reference"``, which is plain autograd: what needs more
than one backward works with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from architectures import Case, implementations
from memspan.errors import MemspanError
from readings import every_case, some_memory, text


@every_case
def test_every_implementation_is_the_reference(case: Case) -> None:
    """Losses, memory and the gradients of every parameter and of the memory before; rows of different
    ages."""
    model = case.model()
    before = some_memory(model, 3)

    def everything(implementation: str | None) -> dict[str, Tensor]:
        memory = before.map(lambda t: t.clone().requires_grad_(t.is_floating_point()))
        tokens, targets = text(3, 9), text(3, 9, 1)
        out = model(tokens, memory, targets=targets, implementation=implementation)
        after = {f"{name} after": t for name, t in out.memory.tensors().items()}
        loss = out.losses.sin().sum() + out.auxiliary_loss
        loss = loss + sum(t.sin().sum() for t in after.values() if t.is_floating_point())
        leaves = dict(model.named_parameters()) | memory.tensors()
        leaves = {name: t for name, t in leaves.items() if t.requires_grad}
        found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        named = after | dict(zip(leaves, found, strict=True)) | {"losses": out.losses}
        return {name: t.detach() for name, t in named.items()}

    expected = everything("reference")
    for implementation in (None, *implementations(model.backbone)):
        for name, found in everything(implementation).items():
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
