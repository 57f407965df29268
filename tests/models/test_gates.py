"""Gates in place of residual sums, against the equations of Parisotto et al. 2019, section 3.2."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from architectures import Case, compressive, randomise, transformer_xl
from golden import assert_same
from memspan.errors import MemspanError
from readings import read, text

Weights = dict[str, Tensor]


def gate(x: Tensor, branch: Tensor, w: Weights, name: str) -> Tensor:
    """By the six matrices W_r, W_z, W_g, U_r, U_z, U_g."""
    y = branch.clamp(min=0)
    u_g = w[f"{name}.of_reset_stream.weight"]
    b = w[f"{name}.bias"]
    w_r, w_z, w_g = w[f"{name}.of_branch.weight"].chunk(3)
    u_r, u_z = w[f"{name}.of_stream.weight"].chunk(2)
    r = 1 / (1 + torch.exp(-(y @ w_r.T + x @ u_r.T)))
    z = 1 / (1 + torch.exp(-(y @ w_z.T + x @ u_z.T - b)))
    return (1 - z) * x + z * torch.tanh(y @ w_g.T + (r * x) @ u_g.T)


def test_values_and_gradients_are_those_of_the_equations() -> None:
    """The gates of a layer stand in place of both residual sums."""
    layer = randomise(transformer_xl(gating="gru", n_layers=1).model()).backbone.layers[0]
    w = dict(layer.named_parameters())
    x, attended = torch.randn(2, 2, 5, 8, dtype=torch.float64).requires_grad_().unbind()
    found = layer.residual(x, attended)
    middle = gate(x, attended, w, "attention_gate")
    fed = layer.feed_forward(layer.feed_forward_norm(middle))
    expected = gate(middle, fed, w, "feed_forward_gate")
    assert_same(found, expected, 1e-9, "output")
    # Attention itself is none of residual's business.
    leaves = {n: p for n, p in w.items() if not n.startswith("attention") or "gate" in n}
    sides = (torch.autograd.grad(y.sin().sum(), leaves.values()) for y in (found, expected))
    for name, ours, theirs in zip(leaves, *sides, strict=True):
        assert_same(ours, theirs, 1e-9, name)
        assert ours.any(), name


def test_compressive_without_compression_is_transformer_xl() -> None:
    """Before anything leaves memory."""
    xl = transformer_xl(gating="gru", memory_length=12).model()
    other = compressive(gating="gru", memory_length=12, compressed_length=0).model()
    other.load_state_dict(xl.state_dict())
    found, expected = (read(model, text(2, 12), [3] * 4)[0] for model in (other, xl))
    assert_same(found, expected, 1e-9, "logits")


@torch.no_grad()
@pytest.mark.parametrize("make", [transformer_xl, compressive])
def test_layers_begin_nearly_as_the_identity(make: Callable[..., Case]) -> None:
    torch.manual_seed(0)
    config = make(gating="gru", d_model=64, n_layers=1, final_norm=False).backbone
    backbone = config.build()
    x = torch.randn(4, 8, 64)
    moved = {}
    for start in (2.0, 0.0):
        for name, parameter in backbone.named_parameters():
            if name.endswith("gate.bias"):
                assert start == 0 or parameter.eq(2).all()
                torch.nn.init.constant_(parameter, start)
        moved[start] = ((backbone(x).hidden - x).norm() / x.norm()).item()
    assert moved[2.0] < 0.4 < 0.7 < moved[0.0]


@pytest.mark.parametrize("make", [transformer_xl, compressive])
def test_gates_need_pre_norm(make: Callable[..., Case]) -> None:
    with pytest.raises(MemspanError, match="gating gru needs normalisation pre, not post: drop"):
        make(gating="gru", normalisation="post")
