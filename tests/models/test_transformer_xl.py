"""Transformer-XL's options: memory length and start, spans, tables of positions, dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from architectures import VOCABULARY, Case, compressive, transformer_xl
from golden import assert_same
from memspan.errors import MemspanError
from memspan.models.options import EmbeddingConfig
from readings import (
    assert_memories_equal,
    cut_texts,
    fields,
    read,
    text,
)

pytestmark = pytest.mark.gradients(recorded=False)


@pytest.mark.parametrize("make", [transformer_xl, compressive])
def test_initial_memory_of_zeros_is_attended(make: Callable[..., Case]) -> None:
    """``zeros``: slots that hold nothing but count, unlike an empty memory."""
    for span in ("segment", "fixed"):
        model = make(attention_span=span).model()
        empty, zeros = model.initial_memory(2), model.initial_memory(2, start="zeros")
        for name, slots in zeros.slots().items():
            assert fields(zeros)[name].tolist() == [slots, slots]
        assert zeros.tokens_seen.tolist() == empty.tokens_seen.tolist() == [0, 0]
        assert not zeros.hidden.any()
        out, other = model(text(2, 4), zeros), model(text(2, 4), empty)
        assert not torch.allclose(out.logits, other.logits)
        assert_same(model.reader(zeros).read(text(2, 4)), out.logits, 1e-9, "reader")
        # What is in sight is forgotten the same way.
        assert_memories_equal(zeros.reset([True, True]), empty)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("span", ["segment", "fixed"])
@given(slots=st.integers(1, 12), drawn=cut_texts())
def test_memory_length_may_change_at_evaluation(
    positions: str, span: str, slots: int, drawn: tuple[Tensor, list[int]]
) -> None:
    """As a model that was made with that memory length, the weights being the same."""
    tokens, lengths = drawn
    options = {"positions": positions, "attention_span": span}
    options |= {"max_distance": 20} if positions == "learned" else {}
    model = transformer_xl(**options).model()
    expected = transformer_xl(memory_length=slots, **options).model()
    assert expected.backbone.config.memory_length == slots
    memory = model.initial_memory(len(tokens), memory_length=slots)
    logits, after = read(model, tokens, lengths, memory)
    own, own_memory = read(expected, tokens, lengths)
    assert_same(logits, own, 1e-9, "logits")
    assert_memories_equal(after, own_memory, 1e-9)
    assert after.hidden.shape[2] == slots
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


def test_fixed_span_sees_exactly_the_last_positions() -> None:
    """One layer: a token M - 1 back matters, one M back does not."""
    model = transformer_xl(n_layers=1, attention_span="fixed").model()
    tokens = text(1, 12)
    for back, matters in ((4, True), (5, False), (0, True)):
        changed = tokens.clone()
        changed[:, 11 - back] = (changed[:, 11 - back] + 1) % VOCABULARY
        same = torch.allclose(model(tokens).logits[:, 11], model(changed).logits[:, 11])
        assert same != matters, back


def test_clamped_distances_share_a_code() -> None:
    """Beyond the clamp order is lost: two far tokens may be swapped, in the first layer's sight."""
    for clamp, same in ((2, True), (None, False)):
        model = transformer_xl(n_layers=1, clamp_length=clamp, memory_length=8).model()
        tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
        swapped = torch.tensor([[2, 1, 3, 4, 5, 6]])
        logits, others = model(tokens).logits[:, -1], model(swapped).logits[:, -1]
        assert torch.allclose(logits, others) == same, clamp


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

    def read(n_tokens: int) -> None:
        model.reader(memory, **options).read(text(1, n_tokens))

    if longest is None:
        read(30)
        return
    if longest:
        read(longest)
    with pytest.raises(MemspanError, match=f"table of {rows} rows: read shorter segments, lower"):
        read(longest + 1)
