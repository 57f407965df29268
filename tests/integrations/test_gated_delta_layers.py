"""Gated-delta layers of transformers: their weights in ours, and back."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging import version
from torch import nn

from golden import assert_same
from memspan.errors import MemspanError
from memspan.lab.integrations.transformers import (
    from_gated_delta_rule,
    to_gated_delta_rule,
)
from memspan.lab.integrations.transformers.gated_delta import to_our_names
from memspan.ops.fast_weights.rules import delta_rule
from statelaws.adapters.recipes import RECIPES, build

TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid")
has_olmo_hybrid = pytest.mark.skipif(
    version.parse(transformers.__version__) < version.parse("5.17"),
    reason="earlier releases name the weights of OLMo Hybrid otherwise",
)
every_type = pytest.mark.parametrize(
    "model_type", [*TYPES[:3], pytest.param(TYPES[3], marks=has_olmo_hybrid)]
)
every_implementation = pytest.mark.parametrize(
    "implementation", ["compiled", "chunked", "reference"]
)
# transformers says in every process once that its own functions are slow.
pytestmark = pytest.mark.filterwarnings("ignore:.*falling back to its reference")


def made(model_type: str = "qwen3_5_text", seed: int = 0) -> Any:
    """A small model whose heads have narrower values than keys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECIPES[model_type], "linear_value_head_dim", 6)
        module: Any = build(model_type, seed).module
    for name, parameter in module.named_parameters():
        if name.endswith("A_log"):
            # Beside stronger decays their differences of sums over a chunk are less exact than 2e-5.
            parameter.data.uniform_(-3, 0)
    return module


def mixer(model: Any) -> Any:
    return model.model.layers[0].linear_attn


# ----- Their weights in our layer


@every_type
@every_implementation
def test_converted_layer_computes_the_same(implementation: str, model_type: str) -> None:
    """Outputs and all gradients in float32, over three of their chunks; OLMo's beta goes to 2."""
    theirs = mixer(made(model_type))
    ours = to_gated_delta_rule(theirs)
    assert ours.config.negative_eigenvalues == (model_type == "olmo_hybrid")
    x, up = torch.randn(2, 2, 150, theirs.hidden_size)
    sides = []
    for part in (theirs, ours):
        own = x.clone().requires_grad_()
        y = part(own) if part is theirs else ours(own, None, implementation)[0]
        (y * up).sum().backward()
        found = {name: p.grad for name, p in part.named_parameters()}
        found = to_our_names(theirs, found) if part is theirs else found
        sides.append({"output": y, "x": own.grad} | found)
    assert sides[0].keys() == sides[1].keys()
    for name, expected in sides[0].items():
        assert_same(sides[1][name], expected, 2e-5, name)


@pytest.mark.smoke
@every_type
def test_weights_survive_the_round_trip(model_type: str) -> None:
    theirs, other = (mixer(made(model_type, seed)).to(torch.float64) for seed in (0, 1))
    state = torch.random.get_rng_state()
    ours = to_gated_delta_rule(theirs)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(p.requires_grad and p.dtype == torch.float64 for p in ours.parameters())
    kept = {name: t.clone() for name, t in theirs.state_dict().items()}
    from_gated_delta_rule(ours, other)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    for side in (theirs, other):
        assert side.state_dict().keys() == kept.keys()
        assert all(torch.equal(side.state_dict()[name], t) for name, t in kept.items())


@has_olmo_hybrid
def test_refuses_layers_that_cannot_be_converted() -> None:
    with pytest.raises(MemspanError, match="Linear is not a layer that can be converted; these"):
        to_gated_delta_rule(nn.Linear(2, 2))
    theirs = mixer(made("olmo_hybrid"))
    ours = to_gated_delta_rule(theirs)
    with pytest.raises(MemspanError, match="has False as negative_eigenvalues, and our layer True"):
        from_gated_delta_rule(ours, mixer(made()))
    theirs.o_norm.variance_epsilon = 1e-3
    with pytest.raises(MemspanError, match=r"has 0\.001 as the epsilon .* and our layer 1e-05"):
        from_gated_delta_rule(ours, theirs)
    theirs.activation = "relu"
    with pytest.raises(MemspanError, match="are followed by relu, ours by silu"):
        to_gated_delta_rule(theirs)
    nn.utils.parametrize.register_parametrization(theirs.q_proj, "weight", nn.Identity())
    with pytest.raises(MemspanError, match=r"not those that are known, as 'q_proj\.param.*: merge"):
        to_gated_delta_rule(theirs)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
@every_implementation
def test_delta_rule_matches_the_naive_form_of_fla(implementation: str, form: str) -> None:
    """Both compute in float32, whatever they are given."""
    pytest.importorskip("einops")
    if (package := importlib.util.find_spec("fla")) is None:
        pytest.skip("needs flash-linear-attention")
    # The file alone: the package needs Triton.
    file = Path(package.submodule_search_locations[0], "ops/gated_delta_rule/naive.py")
    function = runpy.run_path(str(file))[f"naive_{form}_gated_delta_rule"]
    q, v = torch.randn(2, 2, 128, 3, 16).unbind()
    k = F.normalize(torch.randn(2, 128, 3, 16), dim=-1)
    beta = 2 * torch.rand(2, 128, 3)
    g = -F.softplus(torch.randn(2, 128, 3))
    state = torch.randn(2, 3, 16, 16)
    expected = function(q=q, k=k, v=v, beta=beta, g=g, initial_state=state, output_final_state=True)
    heads = [t.transpose(1, 2) for t in (q / 4, k, v, beta)]
    found = delta_rule(*heads, state, log_decay=g.transpose(1, 2), implementation=implementation)
    assert_same(found[0].transpose(1, 2), expected[0], 2e-5, "output")
    assert_same(found[1], expected[1], 2e-5, "state")
