"""The Compressive Transformer beyond the laws: its layout slot by slot, its functions against plain
ones, and where the gradients of its two losses go."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from architectures import compressive
from golden import assert_same
from memspan.errors import MemspanError
from memspan.lab.runs.options import RunConfig
from memspan.lab.training.optimisers import Optimiser, set_learning_rate
from memspan.lab.training.options import OptimConfig
from memspan.models import LanguageModel
from memspan.models.compressive import compression as ops
from memspan.models.compressive.config import CompressiveConfig
from memspan.models.compressive.layer import Compression
from memspan.models.transformer_xl.config import TransformerXLConfig
from readings import text as tokens

# ----- Layout


def slots(vectors: list[Tensor], memory_length: int, compressed_length: int, rate: int) -> Any:
    """The first layer's slots after reading them: memory, and means of what left it."""
    n_runs = max(0, math.ceil((len(vectors) - memory_length) / rate))
    runs = [torch.stack(vectors[n * rate : (n + 1) * rate]).mean(0) for n in range(n_runs)]
    return vectors[n_runs * rate :], runs[max(0, n_runs - compressed_length) :]


@given(
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    resets=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=8, max_size=8),
    rate=st.integers(2, 4),
    extra=st.integers(0, 5),
    compressed_length=st.integers(0, 4),
)
def test_layout_slot_by_slot(
    cuts: list[int], resets: list[list[bool]], rate: int, extra: int, compressed_length: int
) -> None:
    """Uneven cuts and rows reset at different times: every slot holds what it should, and no other
    is in use; the reader agrees."""
    memory_length = rate - 1 + extra
    model = compressive(
        compression="mean",
        compression_rate=rate,
        memory_length=memory_length,
        compressed_length=compressed_length,
    ).model()
    rows: list[list[Tensor]] = [[], [], []]
    memory = model.initial_memory(3)
    for n, (length, reset) in enumerate(zip(cuts, resets, strict=False)):
        memory = memory.reset(reset)
        text = tokens(3, length, n)
        reader = model.reader(memory)
        reader.read(text)
        memory = model(text, memory).memory
        vectors = model.embedding(text).detach()
        for b, gone in enumerate(reset):
            rows[b] = [*([] if gone else rows[b]), *vectors[b]]
            own, compressed = slots(rows[b], memory_length, compressed_length, rate)
            for carried in (memory, reader.memory):
                assert_slots(carried.hidden[b, 0], own, int(carried.length[b]))
                count = int(carried.compressed_length[b])
                assert_slots(carried.compressed[b, 0], compressed, count)


def assert_slots(ours: Tensor, expected: list[Tensor], count: int) -> None:
    assert count == len(expected)
    empty, used = ours.split([len(ours) - count, count])
    assert not empty.any()
    if expected:
        assert_same(used, torch.stack(expected), 1e-12, "slots")


# ----- Functions against plain ones


def plain(kind: str, x: Tensor, parts: list[Tensor], rate: int) -> Tensor:
    """By torch's own layers, and loops."""
    rows = x.transpose(1, 2)
    if kind == "mean":
        return F.avg_pool1d(rows, rate).transpose(1, 2)
    if kind == "max":
        return F.max_pool1d(rows, rate).transpose(1, 2)
    if kind == "convolution":
        return F.conv1d(rows, *parts, stride=rate).transpose(1, 2)
    weights, biases = parts
    outputs = []
    for run in x.split(rate, 1):
        h = F.pad(run.transpose(1, 2), (2 ** len(weights) - rate, 0))
        for level, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            h = F.conv1d(F.relu(h) if level else h, weight, bias, dilation=2**level)
        outputs.append(h)
    return torch.cat(outputs, 2).transpose(1, 2)


@pytest.mark.parametrize("rate", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", ["convolution", "mean", "max", "dilated-convolution"])
def test_functions_and_their_gradients(kind: str, rate: int) -> None:
    torch.manual_seed(rate)
    config = compressive(d_model=6, compression=kind, compression_rate=rate).backbone
    function = Compression(config).double()
    x = torch.randn(2, 3 * rate, 6, dtype=torch.float64, requires_grad=True)
    parts = [nn.init.normal_(parameter) for parameter in function.parameters()]
    ours = function(x, None)
    expected = plain(kind, x, parts, rate)
    assert_same(ours, expected, 1e-12, kind)
    if kind == "dilated-convolution":
        assert 2 ** (len(parts[0]) - 1) < rate <= 2 ** len(parts[0])
    weight = torch.randn_like(expected)
    gradients = [torch.autograd.grad((y * weight).sum(), [x, *parts]) for y in (ours, expected)]
    for a, b in zip(*gradients, strict=True):
        assert_same(a, b, 1e-12, f"gradient of {kind}")


def test_most_used_follows_the_attention() -> None:
    """The slots that stay are those with the largest column sums of the first layer's weights."""
    model = compressive(compression="most-used", auxiliary_loss="none", memory_length=4).model()
    text = tokens(2, 4, 3)
    before = model(tokens(2, 4, 2)).memory
    weights: list[Tensor] = []
    model.backbone(model.embedding(text), before, attention_weights=weights)
    # Of three compressed slots, then four of memory.
    received = weights[0].sum((1, 2))[:, 3:7]
    best = received.unflatten(1, (2, 2)).argmax(-1) + torch.tensor([0, 2])
    expected = ops.pick(before.hidden[:, 0], best)
    reader = model.reader(before)
    reader.read(text)
    for after in (model(text, before).memory, reader.memory):
        assert_same(after.compressed[:, 0, -2:], expected, 1e-12, "kept slots")


def test_reconstruction_loss_is_what_it_says() -> None:
    """Row by row with torch's attention over what is valid; rows without count for nothing."""
    torch.manual_seed(0)
    q, k, v, new_k, new_v = (
        torch.randn(3, 2, n, 4, dtype=torch.float64, requires_grad=True) for n in (5, 6, 6, 3, 3)
    )
    valid = torch.tensor([[False, True, True], [True, True, True], [False, False, False]])
    loss = ops.attention_reconstruction(q, k, v, new_k, new_v, valid)
    errors = []
    for b, first in ((0, 1), (1, 0)):
        old = F.scaled_dot_product_attention(q[b], k[b, :, 2 * first :], v[b, :, 2 * first :])
        new = F.scaled_dot_product_attention(q[b], new_k[b, :, first:], new_v[b, :, first:])
        errors.append((old.detach() - new).square().mean())
    assert_same(loss, torch.stack(errors).mean(), 1e-12, "loss")
    ours = torch.autograd.grad(loss, [k, v, new_k, new_v], allow_unused=True)
    assert ours[0] is None
    assert ours[1] is None
    expected = torch.autograd.grad(torch.stack(errors).mean(), [new_k, new_v])
    for a, b in zip(ours[2:], expected, strict=True):
        assert_same(a, b, 1e-12, "gradient")
    assert ops.attention_reconstruction(q, k, v, new_k, new_v, valid & False) == 0


def test_a_pass_reconstructs_attention_to_what_it_compresses() -> None:
    """A full memory whose oldest four slots leave; nothing but the compression is trained by that."""
    model = compressive(n_layers=1).model()
    layer = next(model.backbone.stack())
    attention = layer.attention
    x = model.embedding(tokens(2, 4, 1))
    full = model(tokens(2, 5)).memory
    out = model(tokens(2, 4, 1), full)
    old = full.hidden[:, 0, :4]
    q, k, v = (t.detach() for t in attention.project(x, old, layer.input_norm))
    new = attention.compression(old.detach(), None)
    new_kv = attention.frozen_keys_and_values(new, layer.input_norm)
    every = torch.ones(new.shape[:2], dtype=torch.bool)
    loss = ops.attention_reconstruction(q, k[:, :, :4], v[:, :, :4], *new_kv, every)
    assert_same(loss, out.auxiliary_loss, 1e-12, "loss")
    assert reached(model, out.auxiliary_loss) == {
        n for n, _ in model.named_parameters() if ".compression." in n
    }


def test_auto_encoding_loss_is_what_it_says() -> None:
    torch.manual_seed(0)
    decoder = nn.ConvTranspose1d(4, 4, 3, stride=3).double()
    old = torch.randn(2, 6, 4).double()
    new = torch.randn(2, 2, 4).double()
    valid = torch.tensor([[True, True], [False, True]])
    loss = ops.auto_encoding(old, new, decoder.weight, decoder.bias, valid)
    error = (decoder(new.transpose(1, 2)).transpose(1, 2) - old).square().unflatten(1, (2, 3))
    assert_same(loss, error.mean((2, 3))[valid].mean(), 1e-12, "loss")


# ----- Whose gradient goes where


def reached(model: LanguageModel, loss: Tensor) -> set[str]:
    """Parameters that the loss has a gradient for that is not zero."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    return {n for n, g in zip(names, gradients, strict=True) if g is not None and g.any()}


@pytest.mark.parametrize(
    ("kind", "auxiliary", "task_gradient"),
    [
        ("convolution", "attention", False),
        ("convolution", "attention", True),
        # Without the task's gradient nothing would train the compression.
        ("convolution", "none", True),
        ("dilated-convolution", "auto-encoding", False),
        ("dilated-convolution", "auto-encoding", True),
    ],
)
def test_losses_reach_their_parameters_alone(
    kind: str, auxiliary: str, task_gradient: bool
) -> None:
    """The auxiliary loss reaches the compression and nothing else; the task all but the compression,
    and that too if asked."""
    options: dict[str, Any] = {"compression": kind, "auxiliary_loss": auxiliary}
    model = compressive(**options, task_gradient=task_gradient).model().train()
    everything = {name for name, _ in model.named_parameters()}
    apart = {name for name in everything if ".compression." in name}
    decoders = {name for name in apart if "decoder" in name}
    memory = None
    task = torch.zeros(())
    loss = torch.zeros(())
    for n in range(4):
        # Memory is never detached.
        out = model(tokens(2, 6, n), memory, targets=tokens(2, 6, n + 9))
        memory = out.memory
        task = task + out.losses.mean()
        loss = loss + out.auxiliary_loss
    assert reached(model, task) == everything - (decoders if task_gradient else apart)
    if auxiliary == "none":
        assert loss == 0
        return
    assert reached(model, loss) == apart
    ids = {id(p) for name, p in model.named_parameters() if name in apart}
    assert {id(p) for p in model.backbone.auxiliary_parameters()} == ids
    sizes = [len(group) for group in model.clip_groups()]
    assert sizes == [len(everything - apart), len(apart)]


def test_auxiliary_loss_reaches_no_projection_that_has_become_another_module() -> None:
    """Neither a parametrised one nor one with a ``forward`` of its own."""
    model = compressive(n_layers=1, compressed_length=2).model()
    attention = next(model.backbone.stack()).attention
    register_parametrization(attention.key, "weight", nn.Linear(8, 8, False).double())
    value = attention.value
    value.forward = lambda x: F.linear(x, value.weight)
    memory = model(tokens(2, 8)).memory.detach()
    loss = model(tokens(2, 8, 1), memory).auxiliary_loss
    assert reached(model, loss) == {n for n, _ in model.named_parameters() if ".compression." in n}


def test_compression_has_a_learning_rate_of_its_own() -> None:
    """A factor on every rate of the schedule; nothing else feels it, nor may others set it."""
    model = compressive(compressed_length=2).model(torch.float32)
    options = OptimConfig(compression_learning_rate=0.25, weight_decay=0.0)
    optimizer = Optimiser(model, options).optimizer
    set_learning_rate(optimizer, 1e-2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        step = 2.5e-3 if ".compression." in name else 1e-2
        torch.testing.assert_close(before[name] - p, torch.full_like(p, step))
    with pytest.raises(MemspanError, match="transformer-xl has none"):
        RunConfig(TransformerXLConfig(), optim=OptimConfig(compression_learning_rate=2.0))


# ----- Statistics


def test_statistics() -> None:
    """One auxiliary loss per layer; in evaluation, shares of attention that add up to one."""
    model = compressive().model()
    out = model(tokens(2, 6))
    names = ["attention_compressed", "attention_memory", "attention_segment"]
    assert set(out.statistics) == {"auxiliary_loss", *names}
    assert all(s.shape == (2,) and not s.requires_grad for s in out.statistics.values())
    assert_same(out.statistics["auxiliary_loss"].sum(), out.auxiliary_loss, 1e-12, "sum")
    # Nothing is remembered yet.
    assert out.statistics["attention_segment"].tolist() == pytest.approx([1.0, 1.0])
    for n in range(3):
        out = model(tokens(2, 6, n), out.memory)
    shares = torch.stack([out.statistics[name] for name in names])
    assert shares.sum(0).tolist() == pytest.approx([1.0, 1.0])
    assert (shares > 0).all()
    # Of all layers or of none, as the whole says.
    model.backbone.layers[0].train()
    assert {s.shape for s in model(tokens(2, 6)).statistics.values()} == {(2,)}
    assert set(model.train()(tokens(2, 6)).statistics) == {"auxiliary_loss"}


# ----- Other sizes, and what is refused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"memory_length": 2, "compression_rate": 4}, "at least 3"),
        ({"memory_length": 0}, "too short to compress"),
        ({"compression_rate": 1}, "at least 2"),
        ({"auxiliary_loss": "none"}, "nothing would train"),
        ({"compressed_length": -1}, "compressed_length"),
        ({"d_model": 9, "n_heads": 2}, "not divisible"),
        ({"positions": "learned"}, "max_distance"),
    ],
)
def test_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(MemspanError, match=says):
        LanguageModel(5, CompressiveConfig(**options))


def test_memories_of_other_sizes() -> None:
    model = compressive().model()
    none = model.initial_memory(2, compressed_length=0)
    assert model(tokens(2, 8), none).memory.compressed.shape[2] == 0
    with pytest.raises(MemspanError, match="too short"):
        model.initial_memory(1, memory_length=0)
