"""Law 6 in float32: no parameter's gradient is far from the one that float64 gives.

Each parameter counts by itself, since a whole gradient's norm hides a small one that is wrong:
``|g32 - g64| <= 1e-4 max(|g64|, 1e-3 |whole gradient|)``, from empty and from full memories, with
attention weights as initialised and, in the papers' scheme, 6 times as large.

Near a kink (relu, DPFP) or a tie (max pooling, the most used slots) float32 may select otherwise than
float64, and both are right about another function. So the text is one where the gradient itself,
computed in float64, stays within the law when all weights move by a little more than float32 rounds.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor

from architectures import CASES, VOCABULARY, Case, fast_weights, implementations
from memspan.memory import Memory
from memspan.models import LanguageModel
from memspan.ops.fast_weights import compiled as delta_rule_loop
from readings import text

TOLERANCE = 1e-4
SMALL = 1e-3
ROUNDING = 1e-6
"""Relative: what float32 leaves of a state after some layers."""
ROWS = 4
LENGTH = 12

# Attention normalisation divides by what may be small, with every map differently.
MORE = {
    f"fast-{rule}-{feature_map}-attention": fast_weights(
        rule=rule, feature_map=feature_map, normalisation="attention"
    )
    for rule, feature_map in (("delta", "dpfp"), ("delta", "favor"), ("sum", "dpfp"))
}
EVERY = CASES | MORE


def model_of(case: Case, scheme: str, factor: int) -> LanguageModel:
    """As initialised in float32, deeper and wider than in the other laws."""
    sizes = {"n_layers": 4, "d_model": 32} | (
        {"d_ff": 48} if hasattr(case.backbone, "d_ff") else {}
    )
    config = dataclasses.replace(case.backbone, **sizes, initialisation=scheme)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LanguageModel(VOCABULARY, config, case.embedding)
    scaled = ("query", "key", "value", "position", "beta")
    with torch.no_grad():
        for name, parameter in model.backbone.named_parameters():
            if any(word in name for word in scaled):
                parameter.mul_(factor)
    return model.eval()


Gradients = dict[str, Tensor]


def gradients(
    model: LanguageModel,
    tokens: Tensor,
    targets: Tensor,
    memory: Memory,
    implementation: str | None = None,
) -> Gradients:
    """Gradients of every parameter, as float64."""
    memory = memory.to(dtype=next(model.parameters()).dtype)
    loss = model(tokens, memory, targets=targets, implementation=implementation).loss
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, materialize_grads=True)
    return {name: gradient.double() for name, gradient in zip(names, found, strict=True)}


def errors(found: Gradients, exact: Gradients) -> dict[str, float]:
    """The quantity that the law bounds, by parameter."""
    whole = torch.stack([g.norm() for g in exact.values()]).norm()
    return {
        name: float((found[name] - g).norm() / torch.maximum(g.norm(), SMALL * whole))
        for name, g in exact.items()
    }


def moved(model: LanguageModel, by: float) -> LanguageModel:
    """The same model with all weights changed by a relative ``by``, one way or the other."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, tensor in model.state_dict().items():
        signs = torch.randint(2, tensor.shape, generator=generator) * 2 - 1
        state[name] = tensor * (1 + by * signs) if tensor.is_floating_point() else tensor
    with torch.no_grad():
        model.load_state_dict(state)
    return model


@pytest.mark.parametrize(
    ("name", "scheme", "factor"),
    [(name, scheme, factor) for name in EVERY for scheme, factor in (("scaled", 1), ("papers", 6))]
    # Small weights are a trial for normalisations alone.
    + [(name, "papers", 1) for name in EVERY if name.startswith("fast")],
)
def test_every_parameter_has_its_gradient_in_float32(
    name: str, scheme: str, factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The compiled loop then goes back through several spans.
    monkeypatch.setattr(delta_rule_loop, "SAVE_EVERY", 5)
    monkeypatch.setattr(delta_rule_loop, "SAVE_EVERY_RECOMPUTING", 7)
    model = model_of(EVERY[name], scheme, factor).double()
    fast = [name for name in implementations(model.float().backbone) if name != "reference"]
    model.double()
    for seed in range(50):
        before, tokens, targets = text(3 * ROWS, LENGTH, seed).split(ROWS)
        with torch.no_grad():
            memory = model(before).memory.reset([True, True, False, False])
        given = (tokens, targets, memory.to(dtype=torch.float32))
        exact = gradients(model, *given, "reference")
        sides = [gradients(moved(copy.deepcopy(model), by), *given) for by in (ROUNDING, -ROUNDING)]
        if max(max(errors(side, exact).values()) for side in sides) <= TOLERANCE:
            break
    else:
        raise AssertionError("no text without kinks and ties")
    model = model.float()
    wrong = {}
    for implementation in ("reference", *fast):
        for parameter, error in errors(gradients(model, *given, implementation), exact).items():
            # Not `>`: a NaN has to fail.
            if not error <= TOLERANCE:
                wrong[implementation, parameter] = error
    assert not wrong
