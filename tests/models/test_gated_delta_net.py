"""Gated DeltaNet against the paper, head by head and token by token."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from architectures import Case, fast_weights, gated_delta_net
from golden import assert_same
from memspan.errors import MemspanError, NonFiniteError
from memspan.models import GatedDeltaNet, GatedDeltaNetConfig, GatedDeltaNetMemory
from memspan.models.gated_delta_net.layer import GatedDeltaRule
from memspan.ops.fast_weights import compiled
from readings import some_memory

IMPLEMENTATIONS = ["chunked", "reference"]
if compiled.available(torch.zeros((), dtype=torch.float64)):
    IMPLEMENTATIONS.append("compiled")


def layer_norm(x: Tensor, norm: nn.Module) -> Tensor:
    return F.layer_norm(x, x.shape, norm.weight, norm.bias)


def mixed_by_hand(part: GatedDeltaRule, xs: list[Tensor], matrices: Tensor, inputs: Tensor) -> Any:
    """One row, from the equations: outputs for ``xs``, and what is carried on.

    Equation 10 as it is written: ``S <- S (alpha (I - beta k k^T)) + beta v k^T`` and ``o = S q``, with
    S the transpose of a memory's matrix.
    """
    config = part.config
    width, served = config.head_width, config.value_heads // config.n_heads
    seen = [
        *inputs,
        *(torch.cat([f.weight @ x for f in (part.query, part.key, part.value)]) for x in xs),
    ]
    states, outputs = [s.T for s in matrices], []
    for t, x in enumerate(xs):
        taps = [part.convolution[:, i] * seen[t + i] for i in range(config.convolution)]
        q, k, v = F.silu(torch.stack(taps).sum(0)).split(config.widths)
        gate, read = part.output_gate.weight @ x, []
        for h in range(config.value_heads):
            at = slice(h // served * width, (h // served + 1) * width)
            q_h, k_h = (u[at] / (u[at] @ u[at] + 1e-6).sqrt() for u in (q, k))
            alpha = (
                -part.A_log[h].exp() * F.softplus(part.step.weight[h] @ x + part.dt_bias[h])
            ).exp()
            beta = (part.beta.weight[h] @ x).sigmoid() * (1 + config.negative_eigenvalues)
            own = slice(h * config.value_width, (h + 1) * config.value_width)
            left = alpha * (torch.eye(width, dtype=x.dtype) - beta * torch.outer(k_h, k_h))
            states[h] = states[h] @ left + beta * torch.outer(v[own], k_h)
            o = states[h] @ q_h / width**0.5
            o = o / (o.square().mean() + 1e-6).sqrt() * part.norm.weight
            read.append(o * gate[own] * gate[own].sigmoid())
        outputs.append(part.output.weight @ torch.cat(read))
    return outputs, torch.stack([s.T for s in states]), torch.stack(seen[len(xs) :][: len(inputs)])


def by_hand(backbone: GatedDeltaNet, x: Tensor, memory: GatedDeltaNetMemory) -> list[Tensor]:
    """The stack: hidden states, matrices and inputs."""
    hidden, matrices, inputs = [], [], []
    for row, weights, carried in zip(x, memory.weights, memory.inputs, strict=True):
        h, own = list(row), []
        for layer, s, before in zip(backbone.stack(), weights, carried, strict=True):
            normed = [layer_norm(u, layer.mixer_norm) for u in h]
            mixed, *after = mixed_by_hand(layer.mixer, normed, s, before)
            h = [u + m for u, m in zip(h, mixed, strict=True)]
            feed = layer.feed_forward
            normed = [layer_norm(u, layer.feed_forward_norm) for u in h]
            h = [u + feed.outer(feed.inner(n).relu()) for u, n in zip(h, normed, strict=True)]
            own.append(after)
        hidden.append(torch.stack([layer_norm(u, backbone.final_norm) for u in h]))
        matrices.append(torch.stack([s for s, _ in own]))
        inputs.append(torch.stack([i for _, i in own]))
    return [torch.stack(each) for each in (hidden, matrices, inputs)]


@pytest.mark.parametrize(
    "case",
    [
        gated_delta_net(),
        gated_delta_net(
            n_heads=2,
            n_value_heads=6,
            d_head=3,
            d_value=5,
            negative_eigenvalues=True,
            convolution=3,
        ),
    ],
    ids=["plain", "shared-keys"],
)
@pytest.mark.parametrize("length", [1, 2, 40])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_it_is_the_paper(implementation: str, length: int, case: Case) -> None:
    """Outputs, memory, and the gradient of every parameter and of the memory before, to 1e-9."""
    backbone = case.model().backbone
    generator = torch.Generator().manual_seed(1)

    def draw(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64)

    x = draw(torch.empty(2, length, 8)).requires_grad_()
    memory = backbone.initial_memory(2)
    memory = memory.map(lambda t: draw(t).requires_grad_() if t.is_floating_point() else t)
    leaves = {"x": x, "weights": memory.weights, "inputs": memory.inputs}
    leaves |= dict(backbone.named_parameters())
    output = backbone(x, memory, implementation=implementation)
    found = [output.hidden, output.memory.weights, output.memory.inputs]
    expected = by_hand(backbone, x, memory)
    upstream = [draw(t) for t in expected]
    sides = []
    for outputs in (found, expected):
        total = sum((o * u).sum() for o, u in zip(outputs, upstream, strict=True))
        sides.append([*outputs, *torch.autograd.grad(total, list(leaves.values()))])
    names = ["hidden", "matrices", "inputs after", *leaves]
    for name, a, b in zip(names, *sides, strict=True):
        assert_same(a, b, 1e-9, name)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(
        MemspanError, match=re.escape("n_value_heads 6 is not a multiple of n_heads 4")
    ):
        GatedDeltaNetConfig(n_value_heads=6)
    with pytest.raises(MemspanError, match="convolution must be at least 1"):
        GatedDeltaNetConfig(convolution=0)


@torch.no_grad()
@pytest.mark.parametrize("kind", [gated_delta_net, fast_weights])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("length", [1, 3])
def test_readers_refuse_what_is_not_finite(
    kind: Callable[[], Case], value: float, length: int
) -> None:
    """In the input, in memory, or in a weight."""
    model = kind().model()
    x = torch.randn(3, length, 8, dtype=torch.float64)
    broken = x.clone()
    broken[1, 0, 0] = value
    memory = some_memory(model, 3)
    memory.weights[1, 0] = value
    with pytest.raises(NonFiniteError, match="rows 1 are not finite"):
        model.backbone.reader(None, 3).read(broken)
    with pytest.raises(NonFiniteError, match="rows 1 are not finite"):
        model.backbone.reader(memory, 3).read(x)
    next(model.backbone.layers[1].parameters()).fill_(math.nan)
    with pytest.raises(NonFiniteError, match="rows 0, 1, 2 are not finite"):
        model.backbone.reader(None, 3).read(x)
