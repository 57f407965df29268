"""Readers give what their models give, whatever rows end, begin and go on meanwhile."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from architectures import VOCABULARY, Case
from golden import assert_same
from memspan.errors import MemspanError
from readings import (
    TOLERANCE,
    assert_memories_equal,
    cut_texts,
    every_case,
    joined,
    precisions,
    rows_of,
    seeds,
    some_memory,
    text,
)

pytestmark = pytest.mark.gradients(recorded=False)
gradients = pytest.mark.gradients


@every_case
@given(dtype=precisions, drawn=cut_texts(), data=st.data(), carried=st.booleans())
def test_reader_equals_model(
    case: Case,
    dtype: torch.dtype,
    drawn: tuple[Tensor, list[int]],
    data: st.DataObject,
    carried: bool,
) -> None:
    """The same logits, losses and memory, however many tokens per call, however old the rows, and
    wherever documents begin."""
    tokens, lengths = drawn
    model, tol = case.shared_model(dtype), TOLERANCE[dtype]
    memory = some_memory(model, len(tokens)) if carried else model.initial_memory(len(tokens))
    reader = model.reader(memory)
    for segment in tokens.split(lengths, 1):
        scored = data.draw(st.booleans(), label="score")
        targets = (segment + 1) % VOCABULARY if scored else None
        seed = data.draw(st.none() | seeds, label="documents")
        starts = None if seed is None else text(*segment.shape, seed) < 2
        out = model(segment, memory, targets=targets, starts=starts)
        ours = reader.read(segment, targets=targets, starts=starts)
        assert_same(ours, out.losses if scored else out.logits, tol, "losses or logits")
        memory = out.memory
        assert_memories_equal(reader.memory, memory, tol)
        if data.draw(st.booleans(), label="branch"):
            reader = model.reader(reader.memory)


@every_case
def test_reader_over_a_long_stream(case: Case) -> None:
    """Past several moves of its buffers, and with a memory that was taken on the way."""
    model = case.shared_model()
    reader, memory, taken = model.reader(batch_size=2), None, []
    for n, length in enumerate([1, 12, 3, 16, 7] * 2):
        segment = text(2, length, n)
        out = model(segment, memory)
        memory = out.memory
        assert_same(reader.read(segment), out.logits, 1e-9, f"logits of call {n}")
        taken.append((reader.memory, memory))
    for ours, expected in taken:
        assert_memories_equal(ours, expected, 1e-9)


# ----- Streams: rows that end, begin and go on at any time


@every_case
@given(dtype=precisions, data=st.data(), seed=seeds)
def test_streams_in_any_order(
    case: Case, dtype: torch.dtype, data: st.DataObject, seed: int
) -> None:
    """Three rows read, begin anew and change places with what waits: each stream as read alone."""
    model, tol = case.shared_model(dtype), TOLERANCE[dtype]
    streams = [rows_of(some_memory(model, 3, seed), n % 3) for n in range(5)]
    empty = model.initial_memory(1).reset([True])
    rows, waiting, taken = [0, 1, 2], [3, 4], []
    reader = model.reader(joined(streams[:3]))
    acts = st.lists(st.sampled_from(["read", "reset", "replace"]), min_size=3, max_size=7)
    for n, act in enumerate(["read", *data.draw(acts, label="acts"), "read"]):
        if act == "read":
            tokens = text(3, data.draw(st.sampled_from([1, 1, 2, 5]), label="T"), seed + n)
            logits = reader.read(tokens)
            for row, stream in enumerate(rows):
                out = model(tokens[[row]], streams[stream])
                streams[stream] = out.memory
                assert_same(logits[[row]], out.logits, tol, f"logits of row {row}")
        elif act == "reset":
            mask = data.draw(st.lists(st.booleans(), min_size=3, max_size=3), label="mask")
            reader.reset(mask if n % 2 else torch.tensor(mask))
            for row in [row for row in range(3) if mask[row]]:
                streams[rows[row]] = empty
        else:
            leaving = data.draw(st.permutations(range(3)), label="rows")[: n % 3]
            kept = reader.select(leaving)
            assert_memories_equal(kept, reader.memory.select(leaving))
            for n_left, row in enumerate(leaving):
                streams[rows[row]] = rows_of(kept, n_left)
                rows[row], waiting = waiting[0], [*waiting[1:], rows[row]]
            coming = joined([streams[rows[row]] for row in leaving]) if leaving else kept
            before = coming.map(Tensor.clone)
            reader.replace(leaving if n % 2 else torch.tensor(leaving, dtype=torch.int64), coming)
            assert_memories_equal(coming, before)
        taken.append((reader.memory, joined([streams[stream] for stream in rows])))
    for ours, expected in taken:
        assert_memories_equal(ours, expected, tol)


@every_case
def test_other_rows_are_untouched(case: Case) -> None:
    """To the last digit right after; a memory that the reader was made from, too."""
    model = case.shared_model()
    start = some_memory(model, 3)
    copied, reader = start.map(Tensor.clone), model.reader(start)
    for _ in range(2):
        before, new = reader.memory, some_memory(model, 1, 9)
        reader.reset([False, True, False])
        assert_memories_equal(reader.memory, before.reset([False, True, False]))
        reader.replace([2], new)
        assert_memories_equal(rows_of(reader.memory, 2), new, 1e-12)
        assert_memories_equal(rows_of(reader.memory, 0), rows_of(before, 0))
        reader.read(text(3, 2))
    assert_memories_equal(start, copied)


@every_case
def test_what_is_not_finite_leaves_with_its_stream(case: Case) -> None:
    model = case.shared_model()
    memory = some_memory(model, 2).map(
        lambda t: t.index_fill(0, torch.tensor(1), torch.nan) if t.is_floating_point() else t
    )
    for length in (1, 3):
        reader = model.reader(memory)
        with contextlib.suppress(MemspanError):
            reader.read(text(2, 2))
        reader.reset([False, True])
        fresh = model.initial_memory(1).reset([True])
        expected = model(text(2, length)[1:], fresh).logits
        assert_same(reader.read(text(2, length))[1:], expected, 1e-9, "logits")


@every_case
def test_reader_refuses_training_mode(case: Case) -> None:
    model = case.model()
    with pytest.raises(MemspanError, match="eval"):
        model.train().reader()
    reader = model.eval().reader()
    model.train()
    with pytest.raises(MemspanError, match="eval"):
        reader.read(text(1, 2))
