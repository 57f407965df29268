"""Mixers against flash-linear-attention, as recorded by ``tests/recorded/from_fla_layers.py``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from golden import Golden, in_both_precisions, parameters
from memspan import layers, models
from memspan.models.matrix.mixer import MatrixMixer

pytestmark = pytest.mark.golden

Parameters = dict[str, Tensor]


def convolved(p: Parameters) -> Parameters:
    """Parameters of the layers whose queries, keys and values pass a convolution."""
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "beta": "b_proj"}
    found = {f"{ours}.weight": p[f"{theirs}.weight"] for ours, theirs in names.items()}
    taps = torch.cat([p[f"{part}_conv1d.weight"] for part in "qkv"]).squeeze(1)
    found |= {"convolution": taps, "norm.weight": p["o_norm.weight"]}
    return found | {"output.weight": p["o_proj.weight"]}


def low_rank(p: Parameters, ours: str, theirs: str) -> Parameters:
    """Both products of ``f_proj`` or ``g_proj``, and a bias if there is one."""
    found = {f"{ours}.down.weight": p[f"{theirs}.0.weight"]}
    found |= {f"{ours}.up.weight": p[f"{theirs}.1.weight"]}
    if f"{theirs}.1.bias" in p:
        found |= {f"{ours}.up.bias": p[f"{theirs}.1.bias"]}
    return found


def kda(config: dict[str, Any], p: Parameters) -> tuple[MatrixMixer, Parameters]:
    made = layers.KimiDeltaAttention(models.KDAConfig(**sizes(config)))
    found = convolved(p) | low_rank(p, "step", "f_proj") | low_rank(p, "output_gate", "g_proj")
    return made, found | {"A_log": p["A_log"], "dt_bias": p["dt_bias"]}


def gla(config: dict[str, Any], p: Parameters) -> tuple[MatrixMixer, Parameters]:
    heads = config["num_heads"]
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output_gate": "g_proj"}
    names |= {"output": "o_proj", "norm": "g_norm_swish_gate"}
    found = {f"{ours}.weight": p[f"{theirs}.weight"] for ours, theirs in names.items()}
    options: dict[str, Any] = {"d_model": config["hidden_size"], "n_heads": heads}
    options |= {"d_head": len(found["key.weight"]) // heads}
    options |= {"d_value": len(found["value.weight"]) // heads}
    if config["cls"] == "MultiScaleRetention":
        options |= {"decay": "retention"}
    else:
        options |= {"decay_rank": config["gate_low_rank_dim"]}
        found |= low_rank(p, "decay", "gk_proj")
    return layers.GatedLinearAttention(models.GLAConfig(**options)), found


def gated_delta_net_2(config: dict[str, Any], p: Parameters) -> tuple[MatrixMixer, Parameters]:
    made = layers.GatedDeltaRule2(models.GatedDeltaNet2Config(**sizes(config)))
    found = convolved(p) | low_rank(p, "step", "f_proj") | low_rank(p, "output_gate", "g_proj")
    found["erase.weight"] = found.pop("beta.weight")
    found["write.weight"] = p["w_proj.weight"]
    return made, found | {"A_log": p["A_log"], "dt_bias": p["dt_bias"]}


def delta_product(config: dict[str, Any], p: Parameters) -> tuple[MatrixMixer, Parameters]:
    options = {"n_householder": config.get("num_householder", 2), "decay": "A_log" in p}
    # Theirs has other defaults.
    given = {"expand_v": 2, "allow_neg_eigval": True} | config
    made = layers.DeltaProductRule(models.DeltaProductConfig(**sizes(given), **options))
    found = convolved(p) | {"output_gate.weight": p["g_proj.weight"]}
    if "A_log" in p:
        found |= {"step.weight": p["a_proj.weight"], "A_log": p["A_log"], "dt_bias": p["dt_bias"]}
    return made, found


def rwkv_7(config: dict[str, Any], p: Parameters) -> tuple[MatrixMixer, Parameters]:
    names = {"query": "r_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    found = {f"{ours}.weight": p[f"{theirs}.weight"] for ours, theirs in names.items()}
    products = {"decay": "w", "rate": "a", "value_mix": "v", "gate": "g"}
    for ours, theirs in products.items():
        found[f"{ours}.down.weight"] = p[f"{theirs}_lora.lora.0.weight"]
        found[f"{ours}.up.weight"] = p[f"{theirs}_lora.lora.2.weight"]
    for ours, theirs in {"decay": "w", "rate": "a", "value": "v"}.items():
        found[f"{ours}_base"] = p[f"{theirs}_lora.lora.2.bias"]
    found |= {f"shift.{name}": p[f"x_{name}"].flatten() for name in "rwkvag"}
    vectors = {"removal": "k_k", "replacement": "k_a", "bonus": "r_k"}
    vectors |= {"norm_weight": "g_norm.weight", "norm_bias": "g_norm.bias"}
    found |= {ours: p[theirs].flatten() for ours, theirs in vectors.items()}
    ranks = {"decay": "decay", "rate": "a", "value": "v", "gate": "gate"}
    options = {f"{o}_rank": config[f"{t}_low_rank_dim"] for o, t in ranks.items()}
    made = models.RWKV7Config(
        n_layers=2, d_model=config["hidden_size"], n_heads=config["num_heads"], **options
    )
    return layers.RWKV7TimeMixing(made, layer=1), found


def sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Options that layers with heads of a given width have."""
    width = config["head_dim"]
    return {
        "d_model": config["hidden_size"],
        "n_heads": config["num_heads"],
        "d_head": width,
        "d_value": round(width * config.get("expand_v", 1)),
        "negative_eigenvalues": config.get("allow_neg_eigval", False),
    }


OURS: dict[str, Callable[[dict[str, Any], Parameters], tuple[MatrixMixer, Parameters]]] = {
    "GatedDeltaNet2": gated_delta_net_2,
    "GatedDeltaProduct": delta_product,
    "GatedLinearAttention": gla,
    "KimiDeltaAttention": kda,
    "MultiScaleRetention": gla,
    "RWKV7Attention": rwkv_7,
}


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
@pytest.mark.parametrize("path", parameters("fla_layers"))
def test_it_is_the_layer_of_fla(path: Path, implementation: str) -> None:
    """Outputs of two segments, the state after them, and the gradients of all parameters and inputs."""
    for golden in in_both_precisions(path):
        leaves = golden.leaves()
        mixer, ours = OURS[golden.config["cls"]](golden.config, leaves)
        assert ours.keys() == dict(mixer.named_parameters()).keys()
        mixer.to(golden.dtype)
        inputs: dict[str, Tensor] = {}
        memory = None
        for n in golden.segments:
            given = read_inputs(golden, f"seg{n}")
            inputs |= {f"seg{n}.{name}": x for name, x in given.items()}
            first = {"first_values": given.pop("v_first")} if "v_first" in given else {}
            read = (given.pop("x"), memory, implementation)
            y, memory = functional_call(mixer, ours, read, first)
            golden.check(f"seg{n}.o", y)
            golden.score(f"seg{n}", y * golden.input(f"seg{n}.w_o"))
        assert memory is not None
        golden.check("state", memory.weights)
        golden.score("end", memory.weights * golden.input("w_state"))
        golden.backward()
        golden.check_gradients(leaves)
        for name, x in inputs.items():
            assert x.grad is not None
            golden.check(f"gradin.{name}", x.grad)


def read_inputs(golden: Golden, segment: str) -> dict[str, Tensor]:
    """Arguments of a segment, whose gradients were recorded."""
    names = ["x", "v_first"] if f"in.{segment}.v_first" in golden else ["x"]
    return {name: golden.input(f"{segment}.{name}").requires_grad_() for name in names}
