"""Gated DeltaNet against layers of transformers with the same weights, and fla's naive forms."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import OlmoHybridConfig, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from golden import assert_same
from memspan.errors import MemspanError
from memspan.integrations.transformers import from_gated_delta_rule, to_gated_delta_rule
from memspan.integrations.transformers.gated_delta import to_our_names
from memspan.ops.fast_weights.rules import delta_rule

HEADS, VALUE_HEADS, KEY, VALUE, D = 2, 4, 8, 6, 20
SIZES: dict[str, Any] = {
    "hidden_size": D,
    "linear_num_key_heads": HEADS,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_key_head_dim": KEY,
    "linear_value_head_dim": VALUE,
}
every = pytest.mark.parametrize("implementation", ["compiled", "chunked", "reference"])


def layer(peer: str) -> Any:
    """One of transformers with random weights."""
    types = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    layers: dict[str, Any] = {
        "qwen3-next": (Qwen3NextGatedDeltaNet, Qwen3NextConfig),
        "qwen3.5": (Qwen3_5GatedDeltaNet, Qwen3_5TextConfig),
        "olmo": (OlmoHybridGatedDeltaNet, OlmoHybridConfig),
    }
    made, config = layers[peer]
    theirs = made(config(**SIZES, **types), 0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
        # Beside stronger decays their differences of sums over a chunk are less exact than 2e-5.
        theirs.A_log.uniform_(-3, 0)
    return theirs


peers = pytest.mark.parametrize("peer", ["qwen3-next", "qwen3.5", "olmo"])


@peers
@every
def test_it_is_the_layer_of_transformers(implementation: str, peer: str) -> None:
    """Outputs and all gradients in float32, over three of their chunks; OLMo's beta goes to 2."""
    torch.manual_seed(0)
    theirs = layer(peer)
    ours = to_gated_delta_rule(theirs)
    assert ours.config.negative_eigenvalues == (peer == "olmo")
    x, up = torch.randn(2, 150, D), torch.randn(2, 150, D)
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


@peers
def test_weights_go_there_and_back(peer: str) -> None:
    theirs, other = layer(peer), layer(peer)
    state = torch.random.get_rng_state()
    ours = to_gated_delta_rule(theirs.to(torch.float64))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(p.requires_grad and p.dtype == torch.float64 for p in ours.parameters())
    kept = {name: t.clone() for name, t in theirs.state_dict().items()}
    from_gated_delta_rule(ours, other.to(torch.float64))
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    for side in (theirs, other):
        assert side.state_dict().keys() == kept.keys()
        assert all(torch.equal(side.state_dict()[name], t) for name, t in kept.items())


def test_what_cannot_be_converted() -> None:
    with pytest.raises(
        MemspanError, match="Linear is not a layer that can be converted; these are"
    ):
        to_gated_delta_rule(nn.Linear(2, 2))
    theirs = layer("olmo")
    theirs.activation = "relu"
    with pytest.raises(MemspanError, match="are followed by relu, ours by silu"):
        to_gated_delta_rule(theirs)
    theirs = layer("olmo")
    nn.utils.parametrize.register_parametrization(theirs.q_proj, "weight", nn.Identity())
    with pytest.raises(MemspanError, match=r"not those that are known, as 'q_proj\.param.*: merge"):
        to_gated_delta_rule(theirs)
    ours, theirs = to_gated_delta_rule(layer("olmo")), layer("qwen3.5")
    with pytest.raises(MemspanError, match="has False as negative_eigenvalues, and our layer True"):
        from_gated_delta_rule(ours, theirs)
    theirs = layer("olmo")
    theirs.o_norm.variance_epsilon = 1e-3
    with pytest.raises(
        MemspanError, match=r"has 0\.001 as the epsilon of its norm, and our layer 1e-05"
    ):
        from_gated_delta_rule(ours, theirs)


def naive() -> ModuleType:
    """fla's file alone: the package itself needs Triton."""
    pytest.importorskip("einops")
    found = importlib.util.find_spec("fla")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs flash-linear-attention")
    path = Path(found.submodule_search_locations[0], "ops/gated_delta_rule/naive.py")
    spec = importlib.util.spec_from_file_location("fla_naive", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
@every
def test_it_is_the_naive_form_of_fla(implementation: str, form: str) -> None:
    """Both compute in float32, whatever they are given."""
    function = getattr(naive(), f"naive_{form}_gated_delta_rule")
    torch.manual_seed(0)
    q, v = torch.randn(2, 2, 128, 3, 16).unbind()
    k = F.normalize(torch.randn(2, 128, 3, 16), dim=-1)
    beta, g = 2 * torch.rand(2, 128, 3), -F.softplus(torch.randn(2, 128, 3))
    state = torch.randn(2, 3, 16, 16)
    expected = function(q=q, k=k, v=v, beta=beta, g=g, initial_state=state, output_final_state=True)
    heads = [t.transpose(1, 2) for t in (q / 4, k, v, beta)]
    found = delta_rule(*heads, state, log_decay=g.transpose(1, 2), implementation=implementation)
    assert_same(found[0].transpose(1, 2), expected[0], 2e-5, "output")
    assert_same(found[1], expected[1], 2e-5, "state")
