"""Gates in place of residual sums, against the equations of Parisotto et al. 2019, section 3.2."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from architectures import Case, compressive, feedback, randomise, transformer_xl
from golden import assert_same
from memspan.errors import MemspanError
from memspan.models import Feedback, LanguageModel, TransformerXL

Weights = dict[str, Tensor]


def gate(x: Tensor, branch: Tensor, w: Weights, name: str) -> Tensor:
    """One number of the stream at a time, by the six matrices W_r, W_z, W_g, U_r, U_z, U_g."""
    d, y = x.shape[-1], branch.clamp(min=0)
    w_r, w_z, w_g = (w[f"{name}.of_branch.weight"][n * d : (n + 1) * d] for n in range(3))
    u_r, u_z = (w[f"{name}.of_stream.weight"][n * d : (n + 1) * d] for n in range(2))
    u_g, b, after = w[f"{name}.of_reset_stream.weight"], w[f"{name}.bias"], []
    r = 1 / (1 + torch.exp(-(y @ w_r.T + x @ u_r.T)))
    for i in range(d):
        z = 1 / (1 + torch.exp(-(y @ w_z[i] + x @ u_z[i] - b[i])))
        h = torch.tanh(y @ w_g[i] + (r * x) @ u_g[i])
        after.append((1 - z) * x[..., i] + z * h)
    return torch.stack(after, -1)


def norm(x: Tensor, w: Weights, name: str) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).square().mean(-1, keepdim=True)
    return (x - mean) / (variance + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def attention(x: Tensor, memory: Tensor, w: Weights, u: Tensor, v: Tensor) -> Tensor:
    """Of the normalised segment ``x [T, D]`` and memory ``[M, D]``, by ``u`` and ``v [H, K]``."""
    context, slots, (n_heads, width) = torch.cat([memory, x]), len(memory), u.shape
    distance = torch.arange(len(context)).double()
    angle = distance[:, None] / 10000 ** (torch.arange(0, x.shape[1], 2).double() / x.shape[1])
    codes = torch.cat([angle.sin(), angle.cos()], 1)
    heads = []
    for h in range(n_heads):
        q, k, v_, r = (
            of @ w[f"attention.{name}.weight"][h * width : (h + 1) * width].T
            for name, of in (
                ("query", x),
                ("key", context),
                ("value", context),
                ("position", codes),
            )
        )
        rows = []
        for i in range(len(x)):
            seen = slots + i + 1
            scores = (q[i] + u[h]) @ k[:seen].T + (q[i] + v[h]) @ r[:seen].flip(0).T
            rows.append((scores / width**0.5).softmax(0) @ v_[:seen])
        heads.append(torch.stack(rows))
    return torch.cat(heads, 1) @ w["attention.output.weight"].T


def derived(
    weights: Weights, x: Tensor, memories: list[Tensor], slots: int
) -> tuple[Tensor, list[Tensor]]:
    """A segment ``[T, D]`` of one row through all layers, and each layer's memory after it."""
    after = []
    for n, memory in enumerate(memories):
        prefix = f"layers.{n}."
        w = {k.removeprefix(prefix): t for k, t in weights.items() if k.startswith(prefix)}
        after.append(torch.cat([memory, x])[-slots:].detach())
        normed = (norm(part, w, "attention_norm") for part in (x, memory))
        u, v = weights["content_bias"][n], weights["position_bias"][n]
        x = gate(x, attention(*normed, w, u, v), w, "attention_gate")
        inner = norm(x, w, "feed_forward_norm") @ w["feed_forward.inner.weight"].T
        inner = (inner + w["feed_forward.inner.bias"]).clamp(min=0)
        fed = inner @ w["feed_forward.outer.weight"].T + w["feed_forward.outer.bias"]
        x = gate(x, fed, w, "feed_forward_gate")
    return norm(x, weights, "final_norm"), after


def test_values_and_gradients_are_those_of_the_equations() -> None:
    """Of three segments, the second and third with memory; of every parameter and of the input."""
    config = transformer_xl(gating="gru").backbone
    backbone = randomise(TransformerXL(config)).double()  # type: ignore[type-var]
    weights = {name: p.detach().clone().requires_grad_() for name, p in backbone.named_parameters()}
    ours, theirs = (torch.randn(2, 9, 8).double().requires_grad_() for _ in range(2))
    theirs = ours.detach().clone().requires_grad_()
    memory, memories = None, [[ours.new_zeros(0, 8)] * config.n_layers for _ in range(2)]
    loss = other = torch.zeros(()).double()
    for segment in (slice(0, 4), slice(4, 5), slice(5, 9)):
        out = backbone(ours[:, segment], memory)
        memory = out.memory.detach()
        loss = loss + out.hidden.sin().sum()
        for row in range(2):
            hidden, memories[row] = derived(
                weights, theirs[row, segment], memories[row], config.memory_length
            )
            assert_same(out.hidden[row], hidden, 1e-9, "hidden")
            for n, slots in enumerate(memories[row]):
                assert_same(memory.hidden[row, n, -len(slots) :], slots, 1e-9, "memory")
            other = other + hidden.sin().sum()
    loss.backward()
    other.backward()
    assert_same(ours.grad, theirs.grad, 1e-9, "input")
    for name, parameter in backbone.named_parameters():
        assert_same(parameter.grad, weights[name].grad, 1e-9, name)
        assert parameter.grad.any(), name


def test_compressive_without_compression_is_transformer_xl() -> None:
    """Before anything leaves memory."""
    xl = transformer_xl(gating="gru", memory_length=12).model()
    other = compressive(gating="gru", memory_length=12, compressed_length=0).model()
    other.load_state_dict(xl.state_dict())
    text, memory, older = torch.randint(0, 11, (2, 12)), None, None
    for segment in text.split(3, 1):
        out, expected = other(segment, older), xl(segment, memory)
        older, memory = out.memory, expected.memory
        assert_same(out.logits, expected.logits, 1e-9, "logits")


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
    with pytest.raises(
        MemspanError, match="gating gru needs normalisation pre, not post: drop one"
    ):
        make(gating="gru", normalisation="post")


def test_weights_mean_nothing_to_another_architecture() -> None:
    backbone = feedback().backbone.build()
    assert isinstance(backbone, Feedback)
    gated = LanguageModel(11, transformer_xl(gating="gru").backbone).backbone
    assert backbone.taken_from(gated) is None
