"""``memspan.layers``: layers outside of their models, with memories of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from architectures import Case, fast_weights, gated_delta_net
from golden import assert_same
from memspan import MemspanError, layers
from memspan.models import (
    CompressiveConfig,
    FastWeightsConfig,
    GatedDeltaNetConfig,
    TransformerXLConfig,
)

CASES = {
    "fast-weights": fast_weights(),
    "attention-normalised": fast_weights(normalisation="attention", norm="post"),
    "gated-delta-net": gated_delta_net(),
}
SIZES: dict[str, Any] = {"d_model": 8, "n_heads": 2, "d_ff": 16, "dropout": 0.0}
SLOTS: dict[str, Any] = SIZES | {"memory_length": 6}
MAKERS: dict[str, Callable[[], nn.Module]] = {
    "FastWeightsAttention": lambda: layers.FastWeightsAttention(FastWeightsConfig(**SIZES)),
    "FastWeightsLayer": lambda: layers.FastWeightsLayer(FastWeightsConfig(**SIZES)),
    "GatedDeltaRule": lambda: layers.GatedDeltaRule(GatedDeltaNetConfig(**SIZES)),
    "GatedDeltaNetLayer": lambda: layers.GatedDeltaNetLayer(GatedDeltaNetConfig(**SIZES)),
    "TransformerXLAttention": lambda: layers.TransformerXLAttention(TransformerXLConfig(**SLOTS)),
    "TransformerXLLayer": lambda: layers.TransformerXLLayer(TransformerXLConfig(**SLOTS)),
    "CompressiveAttention": lambda: layers.CompressiveAttention(CompressiveConfig(**SLOTS)),
    "CompressiveLayer": lambda: layers.CompressiveLayer(CompressiveConfig(**SLOTS)),
}
made = pytest.mark.parametrize("name", MAKERS)


def read(stack: list[Any], x: Tensor, memories: list[Any]) -> tuple[Tensor, list[Any]]:
    """Through all layers, as a model of one's own would."""
    after = []
    for layer, memory in zip(stack, memories, strict=True):
        x, memory = layer(x, memory)
        after.append(memory)
    return x, after


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_layers_in_segments_are_the_model(case: Case) -> None:
    """Outputs, memories and all gradients: those of one pass over the whole text, to 1e-9."""
    backbone: Any = case.model().backbone
    x = torch.randn(2, 23, 8, dtype=torch.float64, requires_grad=True)
    stack, parts = list(backbone.stack()), []
    memories: list[Any] = [None] * len(stack)
    for segment in x.split([1, 9, 2, 11], 1):
        hidden, memories = read(stack, segment, memories)
        parts.append(backbone.final_norm(hidden))
    whole = backbone(x)
    upstream = torch.randn_like(whole.hidden)
    sides = []
    for hidden, weights in (
        (torch.cat(parts, 1), torch.stack([memory.weights for memory in memories], 1)),
        (whole.hidden, whole.memory.weights),
    ):
        leaves = [x, *backbone.parameters()]
        loss = (hidden * upstream).sum() + weights.sum()
        sides.append([hidden, weights, *torch.autograd.grad(loss, leaves)])
    for number, (found, expected) in enumerate(zip(*sides, strict=True)):
        assert_same(found, expected, 1e-9, str(number))


@made
def test_rows_are_independent_streams(name: str) -> None:
    """Reset rows read as new ones, selected rows as the originals; what was passed in stays."""
    layer = MAKERS[name]().double()
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    _, memory, *_ = layer(x)
    kept = {field: tensor.clone() for field, tensor in memory.tensors().items()}
    after = layer(x, memory)[0]
    new = layer(x)[0]
    assert not torch.allclose(after, new)
    reset = layer(x, memory.reset([False, True, False]))[0]
    assert_same(reset, torch.stack([after[0], new[1], after[2]]), 1e-12, "reset")
    chosen = layer(x[[2, 0]], memory.select([2, 0]))[0]
    assert_same(chosen, after[[2, 0]], 1e-12, "select")
    last = layer(x[-1:], memory[-1])[0]
    assert_same(last, after[-1:], 1e-12, "[-1]")
    assert all(torch.equal(tensor, kept[field]) for field, tensor in memory.tensors().items())
    assert any(tensor.requires_grad for tensor in memory.tensors().values())
    assert not any(tensor.requires_grad for tensor in memory.detach().tensors().values())


# RMSNorm of bfloat16 weights warns that it has no fused kernel.
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("name", [name for name in MAKERS if name.startswith(("Fast", "Gated"))])
def test_sums_stay_in_float32(name: str) -> None:
    layer = MAKERS[name]().bfloat16()
    y, memory = layer(torch.randn(2, 3, 8).bfloat16())
    assert y.dtype == torch.bfloat16
    assert {tensor.dtype for tensor in memory.tensors().values()} == {torch.float32}


@made
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 8), r"x must be \[B, T, 8\] with at least one token, not float32 \[2, 8\]"),
        (torch.zeros(2, 3, 9), r"x must be \[B, T, 8\] .*, not float32 \[2, 3, 9\]"),
        (torch.zeros(2, 0, 8), r"with at least one token, not float32 \[2, 0, 8\]"),
        (torch.zeros(2, 3, 8).double(), "x must be float32 as the layer is, not float64"),
        (torch.zeros(2, 3, 8).long(), "x must be float32 as the layer is, not int64"),
        (torch.zeros(2, 3, 8, device="meta"), "x is on meta and the layer on cpu: move one"),
        ("text", r"x must be \[B, T, 8\] with at least one token, not str"),
    ],
)
def test_inputs_that_do_not_fit_are_one_line(name: str, x: Any, message: str) -> None:
    with pytest.raises(MemspanError, match=message) as refused:
        MAKERS[name]()(x)
    assert "\n" not in str(refused.value)


@made
def test_memories_that_do_not_fit_are_one_line(name: str) -> None:
    layer, x = MAKERS[name](), torch.zeros(2, 3, 8)
    memory: Any = layer.initial_memory(2)  # type: ignore[operator]
    rows = r"the memory's \w+ is float32 \[3, .* not float32 \[2, .* use a memory of this model"
    of_a_model = FastWeightsConfig(**SIZES, n_layers=1).build().initial_memory(2)
    for wrong, message in (
        (memory[[0, 0, 1]], rows),
        (memory.to("meta"), r"the memory's \w+ is meta .* on meta, not .* on cpu"),
        (memory.map(lambda t: t.long()), r"the memory's \w+ is int64 \["),
        (of_a_model, r"must be a \w+LayerMemory, not FastWeightsMemory: use .* initial_memory"),
    ):
        with pytest.raises(MemspanError, match=message) as refused:
            layer(x, wrong)
        assert "\n" not in str(refused.value)


# Tracing warns of what is not ours.
@pytest.mark.filterwarnings("ignore")
# One worker imports the compiler.
@pytest.mark.xdist_group("compiled")
@pytest.mark.parametrize("name", [name for name in MAKERS if name.endswith("Layer")])
def test_one_graph_under_compile(name: str) -> None:
    """Output, memory, and what flows back from both."""
    torch._dynamo.reset()
    layer = MAKERS[name]()
    compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, memory = torch.randn(2, 4, 8), layer(torch.randn(2, 4, 8))[1].detach()
    sides = []
    for read_on in (compiled, layer):
        y, after, *more = read_on(x, memory)
        fields = [tensor for tensor in after.tensors().values() if tensor.is_floating_point()]
        loss = y.square().sum() + sum(tensor.sum() for tensor in [*fields, *more])
        gradients = torch.autograd.grad(loss, list(layer.parameters()))
        sides.append([y, *fields, *more, *gradients])
    for found, expected in zip(*sides, strict=True):
        assert_same(found, expected, 1e-5, name)
