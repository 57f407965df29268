"""The laws of SPEC section 0, for every architecture and option in ``architectures.CASES``.

Lengths, cuts and rows are drawn by hypothesis. ``HYPOTHESIS_PROFILE=thorough`` draws more.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from architectures import VOCABULARY, Case
from golden import assert_same
from readings import (
    TOLERANCE,
    assert_memories_equal,
    cut_texts,
    every_case,
    fields,
    precisions,
    read,
    rows_of,
    some_memory,
    text,
)

pytestmark = pytest.mark.gradients(recorded=False)
gradients = pytest.mark.gradients


# ----- 1. Causality


@every_case
@given(dtype=precisions, data=st.data(), drawn=cut_texts(), carried=st.booleans())
def test_causality(
    case: Case,
    dtype: torch.dtype,
    data: st.DataObject,
    drawn: tuple[Tensor, list[int]],
    carried: bool,
) -> None:
    """Logits at t do not change when tokens after t change."""
    tokens, lengths = drawn
    model = case.shared_model(dtype)
    memory = some_memory(model, len(tokens)) if carried else None
    t = data.draw(st.integers(0, tokens.shape[1] - 1), label="t")
    changed = tokens.clone()
    changed[:, t + 1 :] = (changed[:, t + 1 :] + 1) % VOCABULARY
    logits, _ = read(model, tokens, lengths, memory)
    others, _ = read(model, changed, lengths, memory)
    assert_same(others[:, : t + 1], logits[:, : t + 1], TOLERANCE[dtype], "logits before t")


@every_case
def test_tokens_and_memory_change_the_outputs(case: Case) -> None:
    """The laws would hold for a model that looks at nothing: this one looks at all it should, and says
    whether cuts matter to it."""
    model = case.shared_model()
    tokens = text(1, 4)
    changed = tokens.clone()
    changed[:, 2] = (changed[:, 2] + 1) % VOCABULARY
    logits, memory = read(model, tokens, [4])
    others, other_memory = read(model, changed, [4])
    after = [model(tokens[:, :1], m).logits for m in (memory, other_memory)]
    assert not torch.allclose(logits[:, 2], others[:, 2])
    assert torch.allclose(logits[:, 3], others[:, 3]) == case.sees_itself_only
    assert torch.allclose(*after) == case.forgets_segments
    whole, cut = (read(model, text(1, 14), cuts)[0] for cuts in ([14], [1] * 14))
    same = torch.allclose(cut, whole)
    assert model.backbone.cut_invariant() == case.cut_invariant == same


# ----- 2. Cut invariance, or layout


@every_case
@given(dtype=precisions, drawn=cut_texts(), carried=st.booleans())
def test_cuts(
    case: Case, dtype: torch.dtype, drawn: tuple[Tensor, list[int]], carried: bool
) -> None:
    """One call, any segments, or token by token: the same logits and the same memory, or where cuts
    matter by design, as many valid slots, which cover the same tokens."""
    tokens, lengths = drawn
    model = case.shared_model(dtype)
    tol = TOLERANCE[dtype]
    start = some_memory(model, len(tokens)) if carried else model.initial_memory(len(tokens))
    whole, memory = read(model, tokens, [tokens.shape[1]], start)
    assert torch.equal(memory.tokens_seen, start.tokens_seen + tokens.shape[1])
    for cuts in (lengths, [1] * tokens.shape[1]):
        logits, after = read(model, tokens, cuts, start)
        if case.cut_invariant:
            assert_same(logits, whole, tol, "logits")
            assert_memories_equal(after, memory, tol)
        for ours, expected in zip(case.layout(after), case.layout(memory), strict=True):
            assert_same(ours, expected, tol, "layout")


# ----- 3. Row independence; 4. Reset = fresh


@every_case
@given(dtype=precisions, drawn=cut_texts(), data=st.data())
def test_rows(
    case: Case, dtype: torch.dtype, drawn: tuple[Tensor, list[int]], data: st.DataObject
) -> None:
    """In another order, beside rows that are reset: each as it reads alone, after its own memory or,
    where it is reset, after none."""
    tokens, lengths = drawn
    model = case.shared_model(dtype)
    tol = TOLERANCE[dtype]
    numbers = range(len(tokens))
    order = data.draw(st.permutations(numbers), label="order")
    forgotten = data.draw(st.sets(st.sampled_from(numbers), min_size=1), label="forgotten")
    before = some_memory(model, len(tokens))
    reset = before.reset([row in forgotten for row in numbers])
    logits, memory = read(model, tokens[order], lengths, reset.select(order))
    for place, row in enumerate(order):
        start = model.initial_memory(1) if row in forgotten else rows_of(before, row)
        assert_memories_equal(rows_of(reset, row), start)
        expected, after = read(model, tokens[[row]], lengths, start)
        assert_same(logits[[place]], expected, tol, f"logits of row {row}")
        assert_memories_equal(rows_of(memory, place), after, tol)


# ----- 5. Bounded memory


@every_case
def test_bounded_memory(case: Case) -> None:
    """Same size before the first token and ever after; no view pins a larger buffer."""
    model = case.shared_model()
    rows = 2
    memory = model.initial_memory(rows)
    reader = model.reader(memory)
    size = memory.nbytes
    largest = 0
    for n in range(10):
        memory = model(text(rows, 3, n), memory).memory
        reader.read(text(rows, 3, n))
        largest = max(largest, memory.nbytes, reader.memory.nbytes)
    assert memory.nbytes == size == largest
    for kept in (memory, reader.memory):
        for name, tensor in fields(kept).items():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
    # Every field batch first, none of them a scalar.
    assert {len(t) for t in fields(memory).values()} == {rows}


# ----- 6. Gradients and purity


@every_case
@given(drawn=cut_texts())
def test_purity(case: Case, drawn: tuple[Tensor, list[int]]) -> None:
    """The memory passed in is not changed, so a stream can be branched; calls repeat exactly."""
    tokens, lengths = drawn
    model = case.shared_model()
    memory = some_memory(model, len(tokens))
    copied = memory.map(Tensor.clone)
    logits, after = read(model, tokens, lengths, memory)
    reader = model.reader(memory)
    for segment in tokens.split(lengths, 1):
        reader.read(segment, starts=segment == 0)
    assert_memories_equal(memory, copied)

    # A branch goes elsewhere; the first one is then read again.
    read(model, (tokens + 1) % VOCABULARY, lengths, memory)
    again, after_again = read(model, tokens, lengths, memory)
    assert torch.equal(again, logits)
    assert_memories_equal(after_again, after)


@gradients
@every_case
def test_gradients_reach_every_parameter(case: Case) -> None:
    """Three segments, backpropagated through: nothing is left without a gradient, or with a NaN."""
    model = case.model().train()
    memory = None
    total = torch.zeros((), dtype=torch.float64)
    for n in range(3):
        out = model(text(4, 6, n), memory, targets=text(4, 6, n + 9))
        assert out.logits is None
        assert out.losses.shape == (4, 6)
        assert out.auxiliary_loss.shape == ()
        memory = out.memory
        torch.testing.assert_close(out.loss, out.losses.mean() + out.auxiliary_loss)
        total = total + out.loss
    total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # Who sees nothing but itself has nothing to weigh.
        assert parameter.grad.any() or case.sees_itself_only, name


@gradients
@every_case
def test_gradients_of_a_whole_model(case: Case) -> None:
    """Numeric against analytic, with respect to the input vectors and the carried memory; through the
    memory after, too."""
    backbone = case.shared_model().backbone
    x = torch.randn(2, 3, case.backbone.d_model, dtype=torch.float64, requires_grad=True)
    before = backbone(torch.randn(2, 4, case.backbone.d_model, dtype=torch.float64)).memory
    floats = {n: t for n, t in fields(before.detach()).items() if t.is_floating_point()}

    def run(x: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        memory = dataclasses.replace(before.detach(), **dict(zip(floats, values, strict=True)))
        out = backbone(x, memory)
        after = {n: t for n, t in fields(out.memory).items() if n not in case.cut_fields}
        return out.hidden, *(t for t in after.values() if t.is_floating_point())

    inputs = (x, *(t.clone().requires_grad_() for t in floats.values()))
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@every_case
def test_losses_are_those_of_the_logits(case: Case) -> None:
    tokens = text(3, 7)
    model = case.shared_model()
    targets = (tokens * 3 + 1) % VOCABULARY
    memory = some_memory(model, len(tokens))
    plain = model(tokens, memory)
    scored = model(tokens, memory, targets=targets)
    chosen = plain.logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    assert_same(scored.losses, -chosen, 1e-9, "losses")
    assert_memories_equal(scored.memory, plain.memory)
