"""Gated DeltaNet against layers of transformers with the same weights, and fla's naive forms."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import OlmoHybridConfig, Qwen3NextConfig
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from golden import assert_same
from memspan.models import GatedDeltaNetConfig
from memspan.models.gated_delta_net.model import GatedDeltaRule
from memspan.ops.delta_rule.rules import IMPLEMENTATIONS, delta_rule

HEADS, VALUE_HEADS, KEY, VALUE, D = 2, 4, 8, 6, 20
SIZES: dict[str, Any] = {
    "hidden_size": D,
    "linear_num_key_heads": HEADS,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_key_head_dim": KEY,
    "linear_value_head_dim": VALUE,
}
every = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
Tensors = dict[str, Tensor]


def qwen(tensors: Tensors) -> Tensors:
    """Their products are fused, key head by key head: query, key, values, gates; betas, steps."""
    share = VALUE_HEADS // HEADS
    wide = tensors["in_proj_qkvz.weight"].unflatten(0, (HEADS, -1))
    narrow = tensors["in_proj_ba.weight"].unflatten(0, (HEADS, -1))
    parts = *wide.split([KEY, KEY, share * VALUE, share * VALUE], 1), *narrow.split(share, 1)
    names = ("query", "key", "value", "output_gate", "beta", "step")
    named = {f"{n}.weight": part.flatten(0, 1) for n, part in zip(names, parts, strict=True)}
    return named | {"norm.weight": tensors["norm.weight"]} | _same(tensors, "out_proj")


def olmo(tensors: Tensors) -> Tensors:
    """Every product by itself."""
    names = {
        "query": "q_proj", "key": "k_proj", "value": "v_proj", "step": "a_proj", "beta": "b_proj",
        "output_gate": "g_proj", "norm": "o_norm",
    }  # fmt: skip
    named = {f"{our}.weight": tensors[f"{name}.weight"] for our, name in names.items()}
    return named | _same(tensors, "o_proj")


def _same(tensors: Tensors, output: str) -> Tensors:
    return {
        "output.weight": tensors[f"{output}.weight"],
        "convolution": tensors["conv1d.weight"][:, 0],
        "A_log": tensors["A_log"],
        "dt_bias": tensors["dt_bias"],
    }


@pytest.mark.parametrize("peer", ["qwen", "olmo"])
@every
def test_it_is_the_layer_of_transformers(implementation: str, peer: str) -> None:
    """Outputs and all gradients in float32, over three of their chunks; OLMo's beta goes to 2."""
    torch.manual_seed(0)
    config = GatedDeltaNetConfig(
        n_layers=1, d_model=D, n_heads=HEADS, n_value_heads=VALUE_HEADS, d_head=KEY, d_value=VALUE,
        negative_eigenvalues=peer == "olmo",
    )  # fmt: skip
    types = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    if peer == "olmo":
        ours_of, theirs = olmo, OlmoHybridGatedDeltaNet(OlmoHybridConfig(**SIZES, **types), 0)
    else:
        ours_of, theirs = qwen, Qwen3NextGatedDeltaNet(Qwen3NextConfig(**SIZES, **types), 0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
        # Beside stronger decays their differences of sums over a chunk are less exact than this.
        theirs.A_log.uniform_(-3, 0)
    ours = GatedDeltaRule(config)
    # OLMo's norm has another one.
    ours.norm.eps = 1e-5 if peer == "olmo" else 1e-6
    ours.load_state_dict(ours_of(dict(theirs.state_dict())))
    x, up = torch.randn(2, 150, D), torch.randn(2, 150, D)
    memory = torch.zeros(2, VALUE_HEADS, KEY, VALUE), torch.zeros(2, 3, sum(config.widths))
    sides = []
    for part in (theirs, ours):
        own = x.clone().requires_grad_()
        y = part(own) if part is theirs else ours(own, *memory, implementation)[0]
        (y * up).sum().backward()
        found = {name: p.grad for name, p in part.named_parameters()}
        sides.append({"output": y, "x": own.grad} | (ours_of(found) if part is theirs else found))
    assert sides[0].keys() == sides[1].keys()
    for name, expected in sides[0].items():
        assert_same(sides[1][name], expected, 2e-5, name)


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
