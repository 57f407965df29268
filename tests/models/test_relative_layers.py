"""``memspan.layers``: Transformer-XL's and the Compressive Transformer's, outside of their stacks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from architectures import Case, compressive, transformer_xl
from golden import assert_same
from memspan import MemspanError, layers

CASES = {
    "transformer-xl": transformer_xl(),
    "fixed": transformer_xl(attention_span="fixed"),
    "zeros-post": transformer_xl(start="zeros", normalisation="post", norm_epsilon=1e-3),
    "gated": transformer_xl(gating="gru", clamp_length=4, attention_bias=True),
    "learned": transformer_xl(positions="learned", max_distance=32),
    "no-memory": transformer_xl(memory_length=0),
    "compressive": compressive(),
    "fixed-rate-3": compressive(attention_span="fixed", compression_rate=3, task_gradient=True),
    "auto-encoding": compressive(auxiliary_loss="auto-encoding", normalisation="post"),
    "most-used": compressive(compression="most-used", auxiliary_loss="none"),
    "nothing-compressed": compressive(compressed_length=0),
}
each = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
CUTS = [1, 9, 2, 11]


def stack_and_layer(case: Case) -> tuple[Any, Any]:
    """A stack of one layer without a last norm, and the layer by itself with its weights."""
    alone: Any = dataclasses.replace(case.backbone, n_layers=1, final_norm=False)
    backbone = dataclasses.replace(case, backbone=alone).model().backbone
    name = "Compressive" if hasattr(alone, "compression") else "TransformerXL"
    layer = getattr(layers, f"{name}Layer")(alone).double()
    # The compression belongs to the attention here, and the biases to the stack there.
    state = {
        f"attention.{key}" if key.startswith("compression.") else key: tensor
        for key, tensor in backbone.layers[0].state_dict().items()
    } | {
        f"attention.{key}": tensor[0]
        for key, tensor in backbone.state_dict().items()
        if key in ("content_bias", "position_bias")
    }
    layer.load_state_dict(state)
    return backbone, layer


def inputs() -> Tensor:
    return torch.randn(3, sum(CUTS), 8, dtype=torch.float64, requires_grad=True)


def scores(x: Tensor, parts: list[Tensor], memory: Any, losses: list[Tensor]) -> Tensor:
    """A scalar that depends on all that reading returned."""
    hidden = torch.cat(parts, 1)
    fields = [tensor for tensor in memory.tensors().values() if tensor.is_floating_point()]
    return (hidden * x.detach().flip(1)).sum() + sum(f.sin().sum() for f in [*fields, *losses])


@each
def test_a_layer_alone_is_a_stack_of_one(case: Case) -> None:
    """Outputs, memories, auxiliary losses and gradients, with rows that begin anew on the way."""
    backbone, layer = stack_and_layer(case)
    x = inputs()
    anew = torch.tensor([False, True, False])
    theirs: Any = None
    ours: Any = None
    kept: tuple[list[Tensor], ...] = ([], [], [], [])
    for segment in x.split(CUTS, 1):
        out = backbone(segment, theirs)
        y, ours, *losses = layer(segment, ours)
        loss = losses[0] if losses else torch.zeros_like(out.auxiliary_loss)
        assert_same(y, out.hidden, 1e-12, "output")
        assert_same(loss, out.auxiliary_loss, 1e-12, "auxiliary loss")
        for name, field in ours.tensors().items():
            expected = getattr(out.memory, name)
            assert_same(field, expected[:, 0] if field.dim() == 3 else expected, 1e-12, name)
        for values, value in zip(kept, (y, loss, out.hidden, out.auxiliary_loss), strict=True):
            values.append(value)
        theirs, last = out.memory.reset(anew), ours
        ours = ours.reset(anew)
    # Weights in the order of the stack's, whose biases come first and have a layer dimension.
    mine, stacked = dict(layer.named_parameters()), dict(backbone.named_parameters())
    pairs = {
        name: mine[f"attention.{name}"]
        if name in ("content_bias", "position_bias")
        else mine[name.removeprefix("layers.0.").replace("compression.", "attention.compression.")]
        for name in stacked
    }
    assert len(pairs) == len(mine)
    sides = [
        torch.autograd.grad(scores(x, parts, memory, losses), [x, *parameters], allow_unused=True)
        for parts, losses, memory, parameters in (
            (kept[0], kept[1], last, pairs.values()),
            (kept[2], kept[3], out.memory, stacked.values()),
        )
    ]
    for name, found, expected in zip(["x", *pairs], *sides, strict=True):
        assert (found is None) == (expected is None), name
        if found is not None:
            assert_same(found, expected.view_as(found), 1e-12, name)


@pytest.mark.parametrize("whole", [False, True], ids=["attention", "layer"])
def test_a_fixed_span_does_not_depend_on_the_cuts(whole: bool) -> None:
    _, layer = stack_and_layer(CASES["fixed"])
    read = layer if whole else layer.attention
    x, memory, parts = inputs(), None, []
    for segment in x.split(CUTS, 1):
        y, memory = read(segment, memory)
        parts.append(y)
    y, after = read(x)
    assert_same(torch.cat(parts, 1), y, 1e-12, "output")
    assert_same(memory.hidden, after.hidden, 1e-12, "memory")
    assert torch.equal(memory.length, after.length)


@each
def test_attention_alone_is_that_of_the_layer(case: Case) -> None:
    """With the layer's norm: then memory holds inputs before it."""
    _, layer = stack_and_layer(case)
    x, memory = inputs(), None
    for segment in x.split(CUTS, 1):
        expected = layer(segment, memory)
        y, memory, *losses = layer.attention(segment, memory, norm=layer.input_norm)
        assert_same(layer.residual(segment, y), expected[0], 1e-12, "output")
        for field, wanted in expected[1].tensors().items():
            assert torch.equal(getattr(memory, field), wanted)
        assert losses == list(expected[2:])


@each
def test_the_paper_s_equation_is_the_reference(case: Case) -> None:
    _, layer = stack_and_layer(case)
    x = inputs()
    memory = layer(x)[1]
    found, expected = layer(x, memory), layer(x, memory, implementation="reference")
    assert_same(found[0], expected[0], 1e-12, "output")
    assert_same(found[1].hidden, expected[1].hidden, 1e-12, "memory")


@pytest.mark.parametrize("name", ["transformer-xl", "compressive", "auto-encoding", "learned"])
def test_a_new_layer_is_initialised(name: str) -> None:
    """Nothing is left as memory was found; what the compression begins with keeps the slots' scale."""
    config: Any = CASES[name].backbone
    kind = layers.CompressiveLayer if "compression" in vars(config) else layers.TransformerXLLayer
    torch.manual_seed(3)
    layer = kind(config)
    assert all(parameter.abs().max() <= 2 for parameter in layer.parameters())
    compression = getattr(layer.attention, "compression", None)
    if compression is not None:
        slots = torch.ones(1, config.compression_rate, config.d_model)
        assert (compression(slots, None) - 1).abs().max() < 0.5


@pytest.mark.parametrize(
    ("name", "length", "implementation", "message"),
    [
        ("learned", 28, None, "a span of 33 slots, 5 of them memory, exceeds the learned position"),
        ("transformer-xl", 3, "fast", "there is no implementation 'fast': use sdpa, fused, ref"),
        ("compressive", 3, "sdpa", "the sdpa implementation has no gradients: use fused, or"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    name: str, length: int, implementation: str | None, message: str
) -> None:
    _, layer = stack_and_layer(CASES[name])
    with pytest.raises(MemspanError, match=message) as refused:
        layer(torch.zeros(1, length, 8).double(), None, implementation)
    assert "\n" not in str(refused.value)


def test_memories_of_other_sizes_are_one_line() -> None:
    _, layer = stack_and_layer(CASES["compressive"])
    _, longer = stack_and_layer(compressive(memory_length=6))
    x = torch.zeros(2, 3, 8).double()
    with pytest.raises(MemspanError, match=r"memory's hidden is float64 \[2, 6, 8\] .* not \[2, 5"):
        layer(x, longer.initial_memory(2))
    tables = dataclasses.replace(CASES["learned"].backbone, max_distance=None)  # type: ignore[type-var]
    with pytest.raises(MemspanError, match="learned positions need a table size: set max_distance"):
        layers.TransformerXLAttention(tables)  # type: ignore[arg-type]
