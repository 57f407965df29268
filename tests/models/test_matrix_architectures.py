"""Architectures with a matrix per head: options that do not fit, and settings that are one another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from golden import assert_same
from memspan.errors import MemspanError
from memspan.layers import RWKV7Layer
from memspan.models import (
    DeltaProductConfig,
    GatedDeltaNet2Config,
    GatedDeltaNetConfig,
    GLAConfig,
    KDAConfig,
    Mamba2Config,
    RWKV7Config,
)

SIZES: dict[str, Any] = {"n_layers": 1, "d_model": 8, "n_heads": 2, "d_ff": 12}


@pytest.mark.parametrize(
    ("config", "options", "says"),
    [
        (DeltaProductConfig, {"n_householder": 0}, "n_householder must be at least 1, not 0"),
        (KDAConfig, {"d_value": 0}, "d_value must be at least 1, not 0"),
        (KDAConfig, {"d_ff": 0}, "d_ff must be at least 1, not 0"),
        (Mamba2Config, {"n_groups": 3}, "n_groups 3 does not divide n_heads 4"),
        (Mamba2Config, {"d_ff": -1}, "d_ff must be at least 0, not -1"),
        (GLAConfig, {"decay_temperature": 0}, "decay_temperature must be above 0, not 0"),
        (
            GLAConfig,
            {"decay": "retention", "decay_rank": 4},
            "decay_rank belongs to decay gated, not retention",
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_misfits_are_refused_in_one_line(config: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(MemspanError, match=says) as refused:
        config(**options)
    assert "\n" not in str(refused.value)


def test_later_layers_of_rwkv_7_need_the_values_of_the_first() -> None:
    config = RWKV7Config(n_layers=2, d_model=8, n_heads=2, d_ff=12)
    x = torch.randn(2, 5, 8)
    y, memory, values = RWKV7Layer(config)(x, with_values=True)
    later = RWKV7Layer(config, 1)
    assert later(y, first_values=values)[1].weights.shape == memory.weights.shape
    with pytest.raises(MemspanError, match="pass first_values, which the first one returns"):
        later(y)


def test_one_householder_step_is_gated_delta_net() -> None:
    """The same weights give the same outputs, memory and gradients."""
    one = GatedDeltaNetConfig(**SIZES, negative_eigenvalues=True).build().double()
    other = DeltaProductConfig(**SIZES, n_householder=1).build().double()
    assert_same_function(one, other)


def test_one_gate_for_both_is_kda() -> None:
    """Gated DeltaNet 2 whose erase and write gates are Kimi Delta Attention's strength."""
    kda = KDAConfig(**SIZES).build().double()
    theirs = GatedDeltaNet2Config(**SIZES).build().double()
    state = kda.state_dict()
    beta = state.pop("layers.0.mixer.beta.weight").repeat_interleave(4, 0)
    state |= {f"layers.0.mixer.{name}.weight": beta for name in ("erase", "write")}
    theirs.load_state_dict(state)
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    assert_same(theirs(x).hidden, kda(x).hidden, 1e-12, "hidden")
    assert_same(theirs(x).memory.weights, kda(x).memory.weights, 1e-12, "matrices")


def assert_same_function(one: Any, other: Any) -> None:
    other.load_state_dict(one.state_dict())
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    sides = []
    for model in (one, other):
        out = model(x)
        loss = out.hidden.sin().sum() + out.memory.weights.sin().sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        sides.append([out.hidden, out.memory.weights, out.memory.inputs, *gradients])
    for n, (found, expected) in enumerate(zip(*sides, strict=True)):
        assert_same(expected, found, 1e-11, str(n))
