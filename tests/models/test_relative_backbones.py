"""Transformer-XL's options, most of them the Compressive Transformer's, too: memory length and start,
spans, tables of positions, dropout; attention weights; auxiliary losses of documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from architectures import CASES, ONE_OF_EACH, Case, compressive, transformer_xl
from golden import assert_same
from memspan.errors import MemspanError
from memspan.models.options import EmbeddingConfig
from memspan.ops.relative import relative_attention
from readings import assert_memories_equal, cut_texts, fields, read, some_memory, text

pytestmark = pytest.mark.gradients(recorded=False)
SIZED = ("xl-segment", "xl-segment-learned", "xl-fixed", "xl-fixed-learned", "compressive")
both = pytest.mark.parametrize("make", [transformer_xl, compressive])


@both
def test_initial_memory_of_zeros_is_attended(make: Callable[..., Case]) -> None:
    """``zeros``: slots that hold nothing but count, unlike an empty memory."""
    for span in ("segment", "fixed"):
        model = make(attention_span=span).model()
        empty = model.initial_memory(2)
        zeros = model.initial_memory(2, start="zeros")
        for name, slots in zeros.slots().items():
            assert fields(zeros)[name].tolist() == [slots, slots]
        assert zeros.tokens_seen.tolist() == empty.tokens_seen.tolist() == [0, 0]
        assert not zeros.hidden.any()
        out = model(text(2, 4), zeros)
        other = model(text(2, 4), empty)
        assert not torch.allclose(out.logits, other.logits)
        assert_same(model.reader(zeros).read(text(2, 4)), out.logits, 1e-9, "reader")
        # What is in sight is forgotten the same way.
        assert_memories_equal(zeros.reset([True, True]), empty)


@pytest.mark.parametrize("name", SIZED)
@given(slots=st.integers(1, 12), drawn=cut_texts())
def test_sizes_of_memory_may_change_at_evaluation(
    name: str, slots: int, drawn: tuple[Tensor, list[int]]
) -> None:
    """As a model that was made with them, the weights being the same."""
    tokens, lengths = drawn
    case = CASES[name]
    sizes = {"memory_length": slots, "compressed_length": slots // 2 + 1}
    sizes = {size: n for size, n in sizes.items() if hasattr(case.backbone, size)}
    model = case.shared_model()
    expected = case.with_options(**sizes).model()
    memory = model.initial_memory(len(tokens), **sizes)
    logits, after = read(model, tokens, lengths, memory)
    own, own_memory = read(expected, tokens, lengths)
    assert_same(logits, own, 1e-9, "logits")
    assert_memories_equal(after, own_memory, 1e-9)
    reader = model.reader(memory)
    read_logits = torch.cat([reader.read(s) for s in tokens.split(lengths, 1)], 1)
    assert_same(read_logits, own, 1e-9, "reader")


@given(drawn=cut_texts())
def test_a_span_that_holds_everything_is_plain_attention(drawn: tuple[Tensor, list[int]]) -> None:
    """With memory for the whole text, either span gives what one call without cuts gives."""
    tokens, lengths = drawn
    whole, _ = read(transformer_xl(memory_length=40).model(), tokens, [tokens.shape[1]])
    for span in ("segment", "fixed"):
        model = transformer_xl(memory_length=40, attention_span=span).model()
        logits, memory = read(model, tokens, lengths)
        assert_same(logits, whole, 1e-9, span)
        assert memory.length.tolist() == [tokens.shape[1]] * len(tokens)


@pytest.mark.parametrize(
    ("options", "other", "same"),
    [
        ({"attention_span": "fixed"}, [0, 2, 3, 4, 5, 6], True),
        ({"attention_span": "fixed"}, [1, 0, 3, 4, 5, 6], False),
        ({"attention_span": "fixed"}, [1, 2, 3, 4, 5, 0], False),
        ({"clamp_length": 2}, [2, 1, 3, 4, 5, 6], True),
        ({}, [2, 1, 3, 4, 5, 6], False),
    ],
)
def test_last_token_sees_its_span(options: dict[str, Any], other: list[int], same: bool) -> None:
    """With a fixed span exactly the last M = 5 positions; beyond a clamp tokens in any order."""
    model = transformer_xl(n_layers=1, **options).model()
    logits, others = model(torch.tensor([[1, 2, 3, 4, 5, 6], other])).logits[:, -1]
    assert torch.allclose(logits, others) == same


def test_output_dropout_is_the_last_thing_before_the_head() -> None:
    """In training only; memory and the backbone's output do not see it."""
    plain = transformer_xl().model()
    model = transformer_xl(EmbeddingConfig(output_dropout=0.5)).model()
    assert torch.equal(model(text(2, 5)).logits, plain(text(2, 5)).logits)
    torch.manual_seed(0)
    out = model.train()(text(2, 5))
    torch.manual_seed(0)
    dropped = F.dropout(plain.backbone(plain.embedding(text(2, 5))).hidden, 0.5)
    assert_same(out.logits, plain.head(dropped), 1e-9, "logits")
    assert_memories_equal(out.memory, plain(text(2, 5)).memory)


@pytest.mark.parametrize("rows", [8, 9])
@pytest.mark.parametrize("slots", [0, 5, 8, 9])
@pytest.mark.parametrize("options", [{}, {"attention_span": "fixed"}, {"clamp_length": 8}])
def test_the_longest_segment_is_what_can_be_read(
    rows: int, slots: int, options: dict[str, Any]
) -> None:
    """With learned positions the longest span fits, one more is an error that says what to do."""
    if options.get("attention_span") and not slots:
        pytest.skip("a fixed span needs memory")
    model = transformer_xl(positions="learned", max_distance=rows).model()
    memory = model.initial_memory(1, memory_length=slots)
    longest = model.backbone.longest_segment(memory, **options)
    for wrong in ({"attention_span": "all"}, {"clamp_length": 0}):
        with pytest.raises(MemspanError):
            model.backbone.longest_segment(memory, **wrong)

    def read(n_tokens: int) -> None:
        model.reader(memory, **options).read(text(1, n_tokens))

    if longest != 0:
        read(longest or 30)
    if longest is None:
        return
    with pytest.raises(MemspanError, match=f"table of {rows} rows: read shorter segments, lower"):
        read(longest + 1)


@pytest.mark.gradients(recorded=True)
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


def test_shares_of_attention_without_padding() -> None:
    """Shares are those of the row's own tokens; ``sdpa`` has none and gives the same result."""
    backbone = compressive().model().backbone
    x = torch.randn(1, 6, backbone.config.d_model, dtype=torch.float64)
    memory = backbone(x).memory
    lengths = torch.tensor([4])
    alone = backbone(x[:, :4], memory)
    padded = backbone(x, memory, lengths=lengths)
    for name, share in padded.statistics.items():
        assert_same(share, alone.statistics[name], 1e-12, name)
    plain = backbone(x, memory, lengths=lengths, implementation="sdpa")
    assert set(plain.statistics) == {"auxiliary_loss"}
    assert_same(plain.hidden, padded.hidden, 1e-12, "hidden")


@pytest.mark.parametrize("name", ["segment", "fixed", "learned"])
@both
def test_readers_may_have_another_span(make: Callable[..., Case], name: str) -> None:
    """As a model that was made with that span, clamp and memory; the fingerprint stays."""
    made: dict[str, Any] = {"attention_span": "fixed" if name == "fixed" else "segment"}
    if name == "learned":
        made |= {"positions": "learned", "max_distance": 15}
    other = {"attention_span": "segment" if name == "fixed" else "fixed", "clamp_length": 7}
    model = make(**made).model()
    expected = make(**made | other).model()
    fingerprint = model.fingerprint()
    memories = [m.initial_memory(2, memory_length=9) for m in (model, expected)]
    ours = model.reader(memories[0], **other)
    theirs = expected.reader(memories[1])
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


@pytest.mark.gradients(recorded=True)
@both
def test_attention_weights_for_inspection(make: Callable[..., Case]) -> None:
    """Weights of every layer over memory and segment; the first layer's give its values' sum."""
    model = make().model()
    memory = some_memory(model, 3)
    tokens = text(3, 4)
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


@pytest.mark.gradients(recorded=True)
@pytest.mark.parametrize("name", ["xl-fixed", "xl-fixed-learned", "xl-fixed-clamp"])
def test_a_fixed_span_reads_a_long_call_in_pieces(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same results and gradients, documents and padding included."""
    model = CASES[name].model()
    tokens = text(3, 23)
    memory = some_memory(model, 3)
    starts = torch.zeros(3, 23, dtype=torch.bool)
    starts[0, 7] = starts[1, 12] = starts[1, 13] = True
    for options in (
        {},
        {"starts": starts},
        {"starts": starts, "lengths": [23, 13, 0]},
        {"starts": starts, "lengths": [22, 13, 4], "padding": "left"},
    ):
        found: list[list[Tensor]] = []
        for longest in (512, 6):
            monkeypatch.setattr("memspan.models.transformer_xl.model.LONGEST_PIECE", longest)
            model.zero_grad()
            out = model(tokens, memory, targets=tokens, **options)
            out.loss.backward()
            found.append(
                [out.losses.detach(), *out.memory.detach().tensors().values()]
                + [p.grad.clone() for p in model.parameters()]
            )
            if "lengths" not in options:
                reader = model.reader(memory)
                found[-1].append(reader.read(tokens, **options))
                found[-1] += reader.memory.tensors().values()
        torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


def test_a_long_call_with_a_fixed_span_is_not_quadratic(monkeypatch: pytest.MonkeyPatch) -> None:
    """No attention spans more than a piece and the memory: neither the model's nor its reader's."""
    model = CASES["xl-fixed"].model(torch.float32)
    widths = []

    def spy(q: Tensor, k: Tensor, *arguments: Any, **options: Any) -> Tensor:
        widths.append(k.shape[2])
        return relative_attention(q, k, *arguments, **options)

    for module in ("attention", "reader"):
        monkeypatch.setattr(f"memspan.models.relative.{module}.relative_attention", spy)
    model(text(1, 2000))
    model.reader().read(text(1, 2000))
    assert len(widths) == 16
    assert max(widths) == 512 + 5


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_a_call_that_is_too_long_for_memory_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CASES[name].model()
    said = "can't allocate memory: you tried to allocate 80000 bytes. Error code 12"

    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError(said)

    layer = next(iter(model.backbone.layers))
    layer.forward = full
    for call in (model, model.reader(batch_size=2).read):
        with pytest.raises(MemspanError, match=r"^2 rows of 3 tokens .* 80,000 bytes more\): read"):
            call(text(2, 3))
    said = "something else"
    with pytest.raises(RuntimeError, match=r"^something else"):
        model(text(2, 3))
