"""What Transformer-XL and the Compressive Transformer share beyond the laws: spans that a reader
chooses, attention weights, the reference, segments with nothing in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from architectures import CASES, Case, compressive, transformer_xl
from golden import assert_same
from memspan.errors import MemspanError
from readings import assert_memories_equal, fields, some_memory, text


@pytest.mark.parametrize("loss", ["attention", "auto-encoding"])
def test_auxiliary_losses_of_documents_and_padding(loss: str) -> None:
    """Rows whose last documents are read alone, with the mean over those that compress something."""
    model = compressive(auxiliary_loss=loss).model()
    backbone = model.backbone
    with torch.no_grad():
        memory = some_memory(model, 3)
    x = model.embedding(text(3, 8))
    starts = torch.zeros(3, 8, dtype=torch.bool)
    starts[1, 1] = starts[2, 5] = True
    lengths = torch.tensor([5, 8, 8])
    together = backbone(x, memory, starts=starts, lengths=lengths).auxiliary_loss
    rows = memory.reset(starts.any(1))
    alone = [
        backbone(x[[row], first:end], rows.select([row])).auxiliary_loss
        for row, first, end in ((0, 0, 5), (1, 1, 8))
    ]
    # Auto-encoding's mean is over runs: the first row compresses two, the second one.
    weights = torch.tensor([2.0, 1.0] if loss == "auto-encoding" else [1.0, 1.0])
    expected = (torch.stack(alone) * weights).sum() / weights.sum()
    assert_same(together, expected, 1e-9, "auxiliary loss")
    parameters = backbone.auxiliary_parameters()
    for a, b in zip(
        *(torch.autograd.grad(t, parameters) for t in (together, expected)), strict=True
    ):
        assert_same(a, b, 1e-9, "gradient")


@torch.no_grad()
def test_shares_of_attention_without_padding() -> None:
    """Shares are those of the row's own tokens; ``sdpa`` has none and gives the same result."""
    backbone = compressive().model().backbone
    x = torch.randn(1, 6, backbone.config.d_model, dtype=torch.float64)
    memory, lengths = backbone(x).memory, torch.tensor([4])
    alone, padded = backbone(x[:, :4], memory), backbone(x, memory, lengths=lengths)
    for name, share in padded.statistics.items():
        assert_same(share, alone.statistics[name], 1e-12, name)
    plain = backbone(x, memory, lengths=lengths, implementation="sdpa")
    assert set(plain.statistics) == {"auxiliary_loss"}
    assert_same(plain.hidden, padded.hidden, 1e-12, "hidden")


@torch.no_grad()
@pytest.mark.parametrize("name", ["segment", "fixed", "learned"])
@pytest.mark.parametrize("make", [transformer_xl, compressive])
def test_readers_may_have_another_span(make: Callable[..., Case], name: str) -> None:
    """As a model that was made with that span, clamp and memory; the fingerprint stays."""
    made: dict[str, Any] = {"attention_span": "fixed" if name == "fixed" else "segment"}
    if name == "learned":
        made |= {"positions": "learned", "max_distance": 15}
    other = {"attention_span": "segment" if name == "fixed" else "fixed", "clamp_length": 7}
    model, expected = make(**made).model(), make(**made | other).model()
    fingerprint = model.fingerprint()
    memories = [m.initial_memory(2, memory_length=9) for m in (model, expected)]
    ours, theirs = model.reader(memories[0], **other), expected.reader(memories[1])
    for length in (4, 1, 6, 1, 1, 7):
        tokens = text(2, length, length)
        assert_same(ours.read(tokens), theirs.read(tokens), 1e-12, "logits")
    assert_memories_equal(ours.memory, theirs.memory, 1e-12)
    assert not torch.allclose(ours.read(text(2, 3)), model.reader(theirs.memory).read(text(2, 3)))
    assert model.fingerprint() == fingerprint


def test_reader_options_that_are_refused() -> None:
    model = transformer_xl().model()
    none = model.initial_memory(1, memory_length=0)
    attempts = {
        "at least 1 for a fixed span": lambda: model.reader(none, attention_span="fixed"),
        "segment or fixed or None, not 'whole'": lambda: model.reader(attention_span="whole"),
        "at least 1, not 0": lambda: model.reader(clamp_length=0),
        "not an option of a FastWeights": lambda: (
            CASES["fast-delta"].model().reader(clamp_length=3)
        ),
    }
    for says, attempt in attempts.items():
        with pytest.raises(MemspanError, match=says):
            attempt()


@pytest.mark.parametrize("make", [transformer_xl, compressive])
def test_attention_weights_for_inspection(make: Callable[..., Case]) -> None:
    """Of every layer, over memory and segment; those of the first layer give its values' sum."""
    model = make().model()
    memory, tokens = some_memory(model, 3), text(3, 4)
    maps: list[Tensor] = []
    x = model.embedding(tokens)
    assert x.requires_grad
    hidden = model.backbone(x, memory, attention_weights=maps).hidden
    assert_same(hidden, model.backbone(x, memory).hidden, 1e-12, "hidden")
    slots = sum(memory.slots().values())
    assert [m.shape for m in maps] == [(3, 2, 4, slots + 4)] * 2
    assert not any(m.requires_grad for m in maps)
    assert_same(maps[1].sum(-1), torch.ones(3, 2, 4).double(), 1e-12, "sum")
    used = sum(fields(memory)[name] for name in memory.slots())
    column = torch.arange(slots + 4)
    unused = (column < slots - used[:, None])[:, None, None]
    future = column > torch.arange(slots, slots + 4)[:, None]
    assert torch.equal(maps[0] == 0, (unused | future).expand_as(maps[0]))
