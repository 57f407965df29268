"""``memspan.layers``: layers outside of their models, with memories of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from architectures import CASES, ONE_OF_EACH, randomise, transformer_xl
from golden import assert_same
from memspan import MemspanError, layers

RELATIVE = {name: case for name, case in CASES.items() if name.startswith(("xl", "compressive"))}
RELATIVE["xl-zeros"] = transformer_xl(start="zeros", normalisation="post", norm_epsilon=1e-3)
CUTS = [1, 9, 2, 11]
KINDS = {
    "transformer-xl": (layers.TransformerXLLayer, layers.TransformerXLAttention),
    "compressive": (layers.CompressiveLayer, layers.CompressiveAttention),
    "fast-weights": (layers.FastWeightsLayer, layers.FastWeightsAttention),
    "gated-delta-net": (layers.GatedDeltaNetLayer, layers.GatedDeltaRule),
    "rwkv-7": (layers.RWKV7Layer, layers.RWKV7TimeMixing),
    "gated-delta-net-2": (layers.GatedDeltaNet2Layer, layers.GatedDeltaRule2),
    "delta-product": (layers.DeltaProductLayer, layers.DeltaProductRule),
    "gla": (layers.GLALayer, layers.GatedLinearAttention),
    "mamba-2": (layers.Mamba2Layer, layers.Mamba2Mixer),
    "infini": (layers.InfiniLayer, layers.InfiniAttention),
    "kda": (layers.KDALayer, layers.KimiDeltaAttention),
}
made = pytest.mark.parametrize("whole", [True, False], ids=["layer", "attention"])
each_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, whole: bool = True, **options: Any) -> Any:
    """A layer, or its attention, in float32."""
    config = dataclasses.replace(CASES[ONE_OF_EACH[kind]].backbone, **options)
    return KINDS[kind][not whole](config)


def everything(
    read: Callable[[Tensor, Any], tuple[Tensor, Any, Tensor]], parameters: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Outputs, memories and auxiliary losses of some segments, with rows that begin anew on the way,
    and the gradients of all these."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, sum(CUTS), 8, generator=generator, dtype=torch.float64).requires_grad_()
    memory = None
    found = {}
    for n, segment in enumerate(x.split(CUTS, 1)):
        y, memory, loss = read(segment, memory)
        found |= {f"output {n}": y, f"auxiliary loss {n}": loss}
        found |= {f"{name} {n}": t for name, t in memory.tensors().items()}
        memory = memory.reset(torch.tensor([False, True, False]))
    total = sum(t.sin().sum() for t in found.values() if t.requires_grad)
    leaves = {"x": x} | parameters
    gradients = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return found | {f"gradient of {n}": g for n, g in zip(leaves, gradients, strict=True)}


@pytest.mark.parametrize("name", RELATIVE)
def test_a_stack_of_one_reads_as_its_layer(name: str) -> None:
    """A stack without a last norm, whose layer is loaded into one outside, the compression included."""
    case = RELATIVE[name]
    alone: Any = dataclasses.replace(case.backbone, n_layers=1, final_norm=False)
    backbone = dataclasses.replace(case, backbone=alone).model().backbone
    kind = "compressive" if name.startswith("compressive") else "transformer-xl"
    layer: Any = KINDS[kind][0](alone).double()
    (inside,) = backbone.layers
    layer.load_state_dict(inside.state_dict())

    def stacked(segment: Tensor, memory: Any) -> tuple[Tensor, Any, Tensor]:
        out = backbone(segment, memory)
        return out.hidden, out.memory, out.auxiliary_loss

    def by_itself(segment: Tensor, memory: Any) -> tuple[Tensor, Any, Tensor]:
        y, memory, *losses = layer(segment, memory)
        return y, memory, losses[0] if losses else torch.zeros(())

    expected = everything(stacked, dict(inside.named_parameters()))
    for name, found in everything(by_itself, dict(layer.named_parameters())).items():
        assert_same(found, expected[name].view_as(found), 1e-12, name)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["transformer-xl", "compressive"])
def test_layers_are_the_stack_and_carry_its_weights(kind: str, tied: bool) -> None:
    """Weights go from a stack's layers to layers outside, and back; tied biases stay one tensor."""
    case = CASES[ONE_OF_EACH[kind]].with_options(n_layers=3, tie_position_biases=tied)
    backbone = case.model().backbone
    other = randomise(case.model(), seed=5).backbone
    outside = []
    for inside in backbone.layers:
        assert type(inside) is KINDS[kind][0]
        outside.append(make(kind, n_layers=3, tie_position_biases=tied).double())
        outside[-1].load_state_dict(inside.state_dict())
    h = torch.randn(2, 9, 8, dtype=torch.float64)
    found = backbone(h)
    memories = found.memory.layers()
    for layer, after in zip(outside, memories, strict=True):
        h, memory, *_ = layer(h)
        assert memory == after
    assert torch.equal(backbone.final_norm(h), found.hidden)
    for inside, layer in zip(other.layers, outside, strict=True):
        inside.load_state_dict(layer.state_dict())
    other.final_norm.load_state_dict(backbone.final_norm.state_dict())
    assert torch.equal(
        other(torch.zeros(2, 3, 8).double()).hidden, backbone(torch.zeros(2, 3, 8).double()).hidden
    )
    for stack in (backbone, other):
        for name in ("content_bias", "position_bias"):
            biases = {id(getattr(layer.attention, name)) for layer in stack.layers}
            assert len(biases) == (1 if tied else 3)


@made
@each_kind
def test_rows_are_independent_streams(kind: str, whole: bool) -> None:
    """Reset rows read as new ones, selected rows as the originals; what was passed in stays."""
    layer = make(kind, whole).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    _, memory, *_ = layer(x)
    kept = {field: tensor.clone() for field, tensor in memory.tensors().items()}
    after = layer(x, memory)[0]
    new = layer(x)[0]
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
@pytest.mark.parametrize(
    "kind",
    [
        "fast-weights",
        "gated-delta-net",
        "gated-delta-net-2",
        "delta-product",
        "gla",
        "mamba-2",
        "infini",
        "kda",
    ],
)
def test_sums_stay_in_float32(kind: str) -> None:
    y, memory = make(kind).bfloat16()(torch.randn(2, 3, 8).bfloat16())
    assert y.dtype == torch.bfloat16
    kept = (tensor for tensor in memory.tensors().values() if tensor.is_floating_point())
    assert {tensor.dtype for tensor in kept} == {torch.float32}


@made
@each_kind
def test_a_memory_stored_in_half_precision_is_read_on_in_full(kind: str, whole: bool) -> None:
    layer = make(kind, whole)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 7, 8, generator=generator)

    def read(memory: Any) -> tuple[Tensor, Any]:
        y, after, *_ = layer(x, memory)
        return y, after

    stored = read(None)[1].detach().to(torch.float16)
    y, after = read(stored)
    expected, expected_after = read(stored.to(torch.float32))
    assert_same(y, expected, 0.0, "output")
    for name, tensor in after.tensors().items():
        assert tensor.dtype == expected_after.tensors()[name].dtype
        assert_same(tensor, expected_after.tensors()[name], 0.0, name)


@made
@each_kind
def test_misfits_are_refused_in_one_line(kind: str, whole: bool) -> None:
    layer = make(kind, whole)
    x = torch.zeros(2, 3, 8)
    memory: Any = layer.initial_memory(2)
    of_a_model = CASES["fast-delta"].shared_model().initial_memory(2)
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
    with pytest.raises(MemspanError, match="no implementation 'fast': use "):
        layer(x, None, "fast")


def test_a_span_beyond_the_table_is_refused() -> None:
    with pytest.raises(MemspanError, match="a span of 33 slots, 5 of them memory, exceeds the "):
        make("transformer-xl", positions="learned", max_distance=32)(torch.zeros(1, 28, 8))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("transformer-xl", {}),
        ("transformer-xl", {"positions": "learned", "max_distance": 32}),
        ("compressive", {"auxiliary_loss": "auto-encoding"}),
    ],
    ids=str,
)
def test_a_new_layer_is_initialised(kind: str, options: dict[str, Any]) -> None:
    """Nothing is left as memory was found; the compression begins as mean pooling."""
    torch.manual_seed(3)
    layer = make(kind, **options)
    assert all(parameter.abs().max() <= 2 for parameter in layer.parameters())
    if kind == "compressive":
        slots = torch.ones(1, layer.attention.config.compression_rate, 8)
        assert_same(layer.attention.compression(slots, None), slots[:, :1], 1e-6, "slots")
