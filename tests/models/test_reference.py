"""``implementation="reference"`` is plain autograd: what needs more than one backward works with it."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from architectures import Case
from golden import assert_same
from memspan.models.options import EmbeddingConfig
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


@every_case
def test_gradients_per_sample(case: Case) -> None:
    """By ``torch.func``: of every row's loss, all at once. Without adaptive embeddings, whose indexing
    vmap does not know."""
    model = dataclasses.replace(case, embedding=EmbeddingConfig()).model()
    tokens, targets = text(3, LENGTH), text(3, LENGTH, 1)
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
        options = {"targets": targets[None], "implementation": "reference"}
        return functional_call(model, parameters, (tokens[None],), options).losses.sum()

    found = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, tokens, targets)
    for row in range(3):
        losses = model(tokens[[row]], targets=targets[[row]]).losses
        expected = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True)
        for (name, gradient), wanted in zip(found.items(), expected, strict=True):
            wanted = torch.zeros_like(gradient[row]) if wanted is None else wanted
            assert_same(gradient[row], wanted, 1e-9, f"{name} of row {row}")
