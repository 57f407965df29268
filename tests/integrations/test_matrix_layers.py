"""Layers of transformers with a matrix per head: their weights in our mixers."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest
import torch
from packaging import version
from torch import Tensor, nn

from golden import assert_same
from memspan import layers, models
from memspan.models.matrix.mixer import MatrixMixer

# transformers says in every process once that its own functions are slow.
pytestmark = pytest.mark.filterwarnings("ignore:.*falling back to its reference")

D = 16
Parameters = dict[str, Any]


def mamba_2() -> tuple[nn.Module, Any, MatrixMixer, Callable[[Parameters], Parameters]]:
    """A layer, the options that its cache is made from, ours, and their parameters in ours."""
    kind = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    sizes = {"num_heads": 4, "head_dim": 8, "n_groups": 2, "state_size": 6, "expand": 2}
    config = kind.Mamba2Config(
        hidden_size=D, chunk_size=16, layer_norm_epsilon=1e-6, num_hidden_layers=1, **sizes
    )
    options = models.Mamba2Config(d_model=D, n_heads=4, n_groups=2, d_state=6)
    inner = 32
    state = 12

    def ours(p: Parameters) -> Parameters:
        gate, value, key, query, step = p["in_proj.weight"].split([inner, inner, state, state, 4])
        found = {"output_gate": gate, "value": value, "key": key, "query": query, "step": step}
        return {f"{name}.weight": t for name, t in found.items()} | {
            "convolution": by_query(p["conv1d.weight"].squeeze(1)),
            "convolution_bias": by_query(p["conv1d.bias"]),
            "norm_weight": p["norm.weight"],
            "output.weight": p["out_proj.weight"],
            **{name: p[name] for name in ("A_log", "dt_bias", "D")},
        }

    def by_query(channels: Tensor) -> Tensor:
        """Theirs are x, B and C."""
        return torch.cat(channels.split([inner, state, state])[::-1])

    return kind.Mamba2Mixer(config, 0), config, layers.Mamba2Mixer(options), ours


def kimi_linear() -> tuple[nn.Module, Any, MatrixMixer, Callable[[Parameters], Parameters]]:
    """As :func:`mamba_2`."""
    kind = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    config = kind.KimiLinearConfig(
        hidden_size=D,
        linear_num_heads=2,
        linear_head_dim=6,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        rms_norm_eps=1e-6,
    )
    options = models.KDAConfig(d_model=D, n_heads=2, d_head=6)
    names = {
        "query": "q_proj",
        "key": "k_proj",
        "value": "v_proj",
        "beta": "b_proj",
        "step.down": "forget_gate.f_a_proj",
        "step.up": "forget_gate.f_b_proj",
        "output_gate.down": "g_a_proj",
        "output_gate.up": "g_b_proj",
        "norm": "o_norm",
        "output": "o_proj",
    }

    def ours(p: Parameters) -> Parameters:
        return {f"{name}.weight": p[f"{theirs}.weight"] for name, theirs in names.items()} | {
            "convolution": p["conv1d.weight"].squeeze(1),
            "A_log": p["forget_gate.A_log"].flatten(),
            "dt_bias": p["forget_gate.dt_bias"],
            # Theirs has none.
            "output_gate.up.bias": torch.zeros(12),
        }

    return (
        kind.KimiLinearDeltaAttention(config, 0),
        config,
        layers.KimiDeltaAttention(options),
        ours,
    )


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
@pytest.mark.parametrize("make", [mamba_2, kimi_linear])
def test_it_is_the_layer_of_transformers(make: Callable[[], Any], implementation: str) -> None:
    """Outputs of three segments, one of a single token, the state after them, and all gradients."""
    cache_utils = pytest.importorskip("transformers.cache_utils")
    if version.parse(metadata.version("transformers")) < version.parse("5.24"):
        pytest.skip(
            "transformers 5.17 normalises all groups together, and its cache gives no state"
        )
    theirs, config, mixer, renamed = make()
    generator = torch.Generator().manual_seed(3)
    for name, parameter in theirs.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(1 + 0.3 * noise if "norm" in name else 0.4 * noise)
    leaves = dict(theirs.named_parameters())
    x = torch.randn(2, 41, D, generator=generator, requires_grad=True)
    up = torch.randn(2, 41, D, generator=generator)
    expected = theirs(x)
    loss = (expected * up).sum()
    gradients = torch.autograd.grad(loss, [x, *leaves.values()])
    cache = cache_utils.DynamicCache(config=config)
    with torch.no_grad():
        for segment in x.split([24, 1, 16], 1):
            theirs(segment, cache=cache)
    memory = None
    outputs = []
    ours = renamed(leaves)
    assert ours.keys() == dict(mixer.named_parameters()).keys()
    for segment in x.split([24, 1, 16], 1):
        given = (segment, memory, implementation)
        y, memory = torch.func.functional_call(mixer, ours, given)
        outputs.append(y)
    found = torch.cat(outputs, 1)
    assert_same(found, expected, 2e-5, "output")
    state = cache.get_recurrent_state(0, state_idx=0)
    # Mamba-2's is values by keys there.
    state = state.mT if make is mamba_2 else state
    assert memory is not None
    assert_same(memory.weights, state, 2e-5, "state")
    ours_gradients = torch.autograd.grad((found * up).sum(), [x, *leaves.values()])
    for name, own, other in zip(["x", *leaves], ours_gradients, gradients, strict=True):
        assert_same(own, other, 5e-5, name)
