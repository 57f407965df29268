"""``memspan.layers``: layers outside of their models, with memories of their own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from architectures import Case, compressive, fast_weights, gated_delta_net, transformer_xl
from golden import assert_same
from memspan import MemspanError, layers

SUMS = {
    "FastWeights": fast_weights(),
    "GatedDeltaNet": gated_delta_net(),
}
RELATIVE = {
    "TransformerXL": transformer_xl(),
    "TransformerXL-zeros": transformer_xl(start="zeros", normalisation="post", norm_epsilon=1e-3),
    "TransformerXL-gated": transformer_xl(gating="gru", clamp_length=4, attention_bias=True),
    "TransformerXL-learned": transformer_xl(positions="learned", max_distance=32),
    "TransformerXL-no-memory": transformer_xl(memory_length=0),
    "Compressive": compressive(),
    "Compressive-fixed": compressive(
        attention_span="fixed", compression_rate=3, task_gradient=True
    ),
    "Compressive-auto": compressive(auxiliary_loss="auto-encoding", normalisation="post"),
    "Compressive-most-used": compressive(compression="most-used", auxiliary_loss="none"),
    "Compressive-none": compressive(compressed_length=0),
}
CUTS = [1, 9, 2, 11]
ATTENTIONS = {
    "FastWeights": layers.FastWeightsAttention,
    "GatedDeltaNet": layers.GatedDeltaRule,
    "TransformerXL": layers.TransformerXLAttention,
    "Compressive": layers.CompressiveAttention,
}
made = pytest.mark.parametrize("whole", [True, False], ids=["layer", "attention"])
each_kind = pytest.mark.parametrize("name", ATTENTIONS)


def make(name: str, whole: bool = True) -> Any:
    """A layer, or its attention, in float32."""
    config: Any = (SUMS | RELATIVE)[name].backbone
    name = name.partition("-")[0]
    return (getattr(layers, f"{name}Layer") if whole else ATTENTIONS[name])(config)


def inputs() -> Tensor:
    return torch.randn(3, sum(CUTS), 8, dtype=torch.float64, requires_grad=True)


def stack_and_layer(case: Case) -> tuple[Any, Any, dict[str, str]]:
    """A stack of one layer without a last norm, the layer by itself with its weights, and the layer's
    names of the stack's."""
    alone: Any = dataclasses.replace(case.backbone, n_layers=1, final_norm=False)
    backbone = dataclasses.replace(case, backbone=alone).model().backbone
    kind = layers.CompressiveLayer if hasattr(alone, "compression") else layers.TransformerXLLayer
    layer: Any = kind(alone).double()
    # The compression belongs to the attention here, and the biases, per layer, to the stack there.
    biases = ("content_bias", "position_bias")
    names = {
        name: f"attention.{name}"
        if name in biases
        else name.removeprefix("layers.0.").replace("compression.", "attention.compression.")
        for name in backbone.state_dict()
    }
    state = {names[n]: t[0] if n in biases else t for n, t in backbone.state_dict().items()}
    layer.load_state_dict(state)
    return backbone, layer, names


def scores(x: Tensor, parts: list[Tensor], memory: Any, losses: list[Tensor]) -> Tensor:
    """A scalar that depends on all that reading returned."""
    fields = [tensor for tensor in memory.tensors().values() if tensor.is_floating_point()]
    total = sum(f.sin().sum() for f in [*fields, *losses])
    return (torch.cat(parts, 1) * x.detach().flip(1)).sum() + total


@pytest.mark.parametrize("case", RELATIVE.values(), ids=RELATIVE)
def test_a_layer_alone_is_a_stack_of_one(case: Case) -> None:
    """Outputs, memories, auxiliary losses and gradients, with rows that begin anew on the way; its
    attention alone, with the layer's norm, does the layer's part."""
    backbone, layer, names = stack_and_layer(case)
    x, anew = inputs(), torch.tensor([False, True, False])
    theirs: Any = None
    ours: Any = None
    kept: tuple[list[Tensor], ...] = ([], [], [], [])
    for segment in x.split(CUTS, 1):
        attended, remembered, *_ = layer.attention(segment, ours, norm=layer.input_norm)
        out = backbone(segment, theirs)
        y, ours, *losses = layer(segment, ours)
        loss = losses[0] if losses else torch.zeros_like(out.auxiliary_loss)
        assert_same(y, out.hidden, 1e-12, "output")
        assert_same(layer.residual(segment, attended), y, 1e-12, "output of the attention")
        assert_same(loss, out.auxiliary_loss, 1e-12, "auxiliary loss")
        for name, field in ours.tensors().items():
            expected = getattr(out.memory, name)
            assert_same(field, expected[:, 0] if field.dim() == 3 else expected, 1e-12, name)
            assert torch.equal(getattr(remembered, name), field), name
        for values, value in zip(kept, (y, loss, out.hidden, out.auxiliary_loss), strict=True):
            values.append(value)
        theirs, last = out.memory.reset(anew), ours
        ours = ours.reset(anew)
    mine, stacked = dict(layer.named_parameters()), dict(backbone.named_parameters())
    assert {names[name] for name in stacked} == set(mine)
    sides = [
        torch.autograd.grad(scores(x, parts, memory, losses), [x, *parameters], allow_unused=True)
        for parts, losses, memory, parameters in (
            (kept[0], kept[1], last, [mine[names[name]] for name in stacked]),
            (kept[2], kept[3], out.memory, stacked.values()),
        )
    ]
    for name, found, expected in zip(["x", *stacked], *sides, strict=True):
        assert (found is None) == (expected is None), name
        if found is not None:
            assert_same(found, expected.view_as(found), 1e-12, name)


@made
@each_kind
def test_rows_are_independent_streams(name: str, whole: bool) -> None:
    """Reset rows read as new ones, selected rows as the originals; what was passed in stays."""
    layer = make(name, whole).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    _, memory, *_ = layer(x)
    kept = {field: tensor.clone() for field, tensor in memory.tensors().items()}
    after, new = layer(x, memory)[0], layer(x)[0]
    assert not torch.allclose(after, new)
    reset = layer(x, memory.reset([False, True, False]))[0]
    assert_same(reset, torch.stack([after[0], new[1], after[2]]), 1e-12, "reset")
    for rows, chosen in (([2, 0], memory.select([2, 0])), ([-1], memory[-1])):
        assert_same(layer(x[rows], chosen)[0], after[rows], 1e-12, str(rows))
    assert all(torch.equal(tensor, kept[field]) for field, tensor in memory.tensors().items())
    assert any(tensor.requires_grad for tensor in memory.tensors().values())
    assert not any(tensor.requires_grad for tensor in memory.detach().tensors().values())


# RMSNorm of bfloat16 weights warns that it has no fused kernel.
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("name", ["FastWeights", "GatedDeltaNet"])
def test_sums_stay_in_float32(name: str) -> None:
    y, memory = make(name).bfloat16()(torch.randn(2, 3, 8).bfloat16())
    assert y.dtype == torch.bfloat16
    assert {tensor.dtype for tensor in memory.tensors().values()} == {torch.float32}


@made
@each_kind
def test_what_does_not_fit_is_one_line(name: str, whole: bool) -> None:
    layer, x = make(name, whole), torch.zeros(2, 3, 8)
    memory: Any = layer.initial_memory(2)
    of_a_model = SUMS["FastWeights"].shared_model().initial_memory(2)
    form = r"x must be \[B, T, 8\] with at least one token, not "
    attempts: list[tuple[Any, Any, str]] = [
        (x[0], None, rf"{form}float32 \[3, 8\]"),
        (x[:, :0], None, rf"{form}float32 \[2, 0, 8\]"),
        ("text", None, rf"{form}str"),
        (x.double(), None, "x must be float32 as the layer is, not float64"),
        (x.to("meta"), None, "x is on meta and the layer on cpu: move one"),
        (x, memory[[0, 0, 1]], r"memory's \w+ is float32 \[3, .* not float32 \[2, .* use a memory"),
        (x, memory.to("meta"), r"the memory's \w+ is meta .* on meta, not .* on cpu"),
        (x, memory.map(lambda t: t.long()), r"the memory's \w+ is int64 \["),
        (x, of_a_model, r"a \w+LayerMemory, not a FastWeightsMemory: use .* initial_memory"),
    ]
    for given, before, message in attempts:
        with pytest.raises(MemspanError, match=message) as refused:
            layer(given, before)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["TransformerXL", "TransformerXL-learned", "Compressive-auto"])
def test_a_new_layer_is_initialised(name: str) -> None:
    """Nothing is left as memory was found; what the compression begins with keeps the slots' scale."""
    torch.manual_seed(3)
    layer = make(name)
    assert all(parameter.abs().max() <= 2 for parameter in layer.parameters())
    if hasattr(layer.attention, "compression"):
        slots = torch.ones(1, RELATIVE[name].backbone.compression_rate, 8)
        assert (layer.attention.compression(slots, None) - 1).abs().max() < 0.5


@pytest.mark.parametrize(
    ("name", "length", "implementation", "message"),
    [
        ("TransformerXL-learned", 28, None, "a span of 33 slots, 5 of them memory, exceeds the "),
        ("TransformerXL", 3, "fast", "there is no implementation 'fast': use sdpa, fused, ref"),
        ("Compressive", 3, "sdpa", "the sdpa implementation has no gradients: use fused, or"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    name: str, length: int, implementation: str | None, message: str
) -> None:
    with pytest.raises(MemspanError, match=message):
        make(name)(torch.zeros(1, length, 8), None, implementation)
