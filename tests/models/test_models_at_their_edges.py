"""Models and layers at their edges: no rows, one token, views, int8, weights with a history."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from architectures import CASES, ONE_OF_EACH, Case, implementations
from golden import assert_same
from memspan.models.gated_delta_net.config import GatedDeltaNetConfig
from memspan.models.gated_delta_net.layer import GatedDeltaRule
from memspan.models.registry import MODELS
from readings import assert_memories_equal, every_case, text

each_architecture = pytest.mark.parametrize("name", MODELS)


def case_of(name: str) -> Case:
    return CASES[ONE_OF_EACH[name]]


@every_case
def test_no_rows_are_read_as_some(case: Case) -> None:
    """By passes, with a gradient and without, and by steps until memory is full."""
    model = case.shared_model()
    for how in (None, *implementations(model.backbone)):
        some = model(text(2, 5), implementation=how)
        none = model(text(0, 5), implementation=how)
        assert none.logits.shape == (0, *some.logits.shape[1:])
        assert_memories_equal(none.memory, some.memory.select([]), 0.0)
    reader = model.backbone.reader(None, batch_size=0)
    for _ in range(9):
        assert reader.step(torch.zeros(0, 8, dtype=torch.float64)).shape == (0, 8)


@every_case
def test_vectors_may_be_views(case: Case) -> None:
    backbone = case.shared_model().backbone
    one = torch.randn(1, 1, 8, dtype=torch.float64)
    turned = torch.randn(8, 4, 2, dtype=torch.float64).transpose(0, 2)
    for x in (one.expand(2, 4, 8), turned, turned[:, ::2]):
        for how in (None, *implementations(backbone)):
            found, expected = (backbone(t, implementation=how).hidden for t in (x, x.contiguous()))
            assert_same(found, expected, 1e-12, str(how))


@each_architecture
@pytest.mark.filterwarnings("ignore")
def test_linear_layers_in_int8(name: str) -> None:
    """Fast Weights had no parameter left to take its type from."""
    model = case_of(name).model(torch.float32)
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    with torch.no_grad():
        found = quantized(text(2, 5)).logits
        expected = model(text(2, 5)).logits
    assert (found - expected).norm() < 0.2 * expected.norm()


class Stepping(nn.Module):
    """A policy: a reader of its own for every call."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, x: Tensor) -> Tensor:
        reader = self.backbone.reader(None, batch_size=len(x))
        return torch.stack([reader.step(x) for _ in range(9)])


@each_architecture
@pytest.mark.parametrize("history", [True, False])
def test_a_reader_made_within_functional_call(name: str, history: bool) -> None:
    """It reads with the weights of the call."""
    stepping, other = (Stepping(case_of(name).model().backbone) for _ in range(2))
    x = torch.randn(2, 8, dtype=torch.float64)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    weights = {n: p * 1 if history else p.detach() for n, p in other.named_parameters()}
    assert_same(functional_call(stepping, weights, (x,)), other(x), 1e-12, name)


def test_gradients_are_finite_whatever_the_rate() -> None:
    """``exp(A_log)`` overflows float32 from 89 on."""
    layer = GatedDeltaRule(GatedDeltaNetConfig(d_model=8, n_heads=2))
    with torch.no_grad():
        layer.A_log.copy_(torch.tensor([90.0, 1.0]))
    for how in (None, "chunked", "reference"):
        layer.zero_grad()
        y, memory = layer(torch.randn(2, 5, 8), None, how)
        (y.sum() + memory.weights.sum()).backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters()), how
