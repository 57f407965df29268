"""Gated DeltaNet against the paper, head by head and token by token; the smallest version is whole
models of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from architectures import Case, gated_delta_net
from golden import assert_same
from memspan.errors import MemspanError
from memspan.models import GatedDeltaNetConfig
from memspan.models.gated_delta_net.layer import GatedDeltaRule
from memspan.models.matrix.mixer import MatrixLayerMemory
from memspan.ops.fast_weights import compiled

IMPLEMENTATIONS = ["chunked", "reference"]
if compiled.available(torch.zeros((), dtype=torch.float64)):
    IMPLEMENTATIONS.append("compiled")
CASES = {
    "plain": gated_delta_net(),
    "shared-keys": gated_delta_net(
        n_value_heads=6, d_head=3, d_value=5, negative_eigenvalues=True, convolution=3
    ),
}


def by_hand(part: GatedDeltaRule, xs: Tensor, matrices: Tensor, inputs: Tensor) -> list[Tensor]:
    """One row, from the equations: outputs for ``xs``, and what is carried on.

    Equation 10 as it is written: ``S <- S (alpha (I - beta k k^T)) + beta v k^T`` and ``o = S q``, with
    S the transpose of a memory's matrix.
    """
    config = part.config
    width = config.head_width
    served = config.value_heads // config.n_heads
    projected = torch.cat([f(xs) for f in (part.query, part.key, part.value)], -1)
    seen = torch.cat([inputs, projected])
    outputs = []
    states = [s.T for s in matrices]
    for t, x in enumerate(xs):
        taps = [part.convolution[:, i] * seen[t + i] for i in range(config.convolution)]
        q, k, v = F.silu(torch.stack(taps).sum(0)).split(config.widths)
        gate = F.silu(part.output_gate.weight @ x)
        read = []
        for h in range(config.value_heads):
            at = slice(h // served * width, (h // served + 1) * width)
            q_h, k_h = (u[at] / (u[at] @ u[at] + 1e-6).sqrt() for u in (q, k))
            step = F.softplus(part.step.weight[h] @ x + part.dt_bias[h])
            alpha = (-part.A_log[h].exp() * step).exp()
            beta = (part.beta.weight[h] @ x).sigmoid() * (1 + config.negative_eigenvalues)
            own = slice(h * config.value_width, (h + 1) * config.value_width)
            left = alpha * (torch.eye(width, dtype=x.dtype) - beta * torch.outer(k_h, k_h))
            states[h] = states[h] @ left + beta * torch.outer(v[own], k_h)
            o = states[h] @ q_h / width**0.5
            read.append(o / (o.square().mean() + 1e-6).sqrt() * part.norm.weight * gate[own])
        outputs.append(part.output.weight @ torch.cat(read))
    return [torch.stack(outputs), torch.stack([s.T for s in states]), seen[len(xs) :]]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("length", [1, 2, 40])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_it_is_the_paper(implementation: str, length: int, case: Case) -> None:
    """Outputs, memory, and the gradient of every parameter and of the memory before, to 1e-9."""
    part = case.model().backbone.layers[1].mixer
    x = torch.randn(2, length, 8, dtype=torch.float64, requires_grad=True)
    empty = part.initial_memory(2).tensors()
    before = {name: torch.randn_like(t).requires_grad_() for name, t in empty.items()}
    y, after = part(x, MatrixLayerMemory(**before), implementation)
    rows = zip(x, *before.values(), strict=True)
    expected = [torch.stack(each) for each in zip(*(by_hand(part, *r) for r in rows), strict=True)]
    upstream = [torch.randn_like(t) for t in expected]
    leaves: dict[str, Any] = {"x": x} | before | dict(part.named_parameters())
    sides = (
        [*found, *torch.autograd.grad(found, list(leaves.values()), upstream)]
        for found in ([y, after.weights, after.inputs], expected)
    )
    names = ["output", "matrices after", "inputs after", *leaves]
    for name, ours, theirs in zip(names, *sides, strict=True):
        assert_same(ours, theirs, 1e-9, name)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"n_value_heads": 6}, "n_value_heads 6 is not a multiple of n_heads 4"),
        ({"convolution": 0}, "convolution must be at least 1"),
    ],
    ids=str,
)
def test_misfits_are_refused(options: dict[str, int], says: str) -> None:
    with pytest.raises(MemspanError, match=says):
        GatedDeltaNetConfig(**options)
