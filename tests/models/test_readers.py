"""Readers give what their models give, whatever rows end, begin and go on meanwhile."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from architectures import VOCABULARY, Case
from golden import assert_same
from memspan.errors import MemspanError, NonFiniteError
from memspan.memory import concatenate
from memspan.models import FastWeights, GatedDeltaNet
from readings import (
    TOLERANCE,
    assert_memories_equal,
    every_case,
    precisions,
    rows_of,
    seeds,
    some_memory,
    text,
)

pytestmark = pytest.mark.gradients(recorded=False)
ACTS = ["read", "reset", "replace", "branch"]


@every_case
@given(dtype=precisions, data=st.data(), seed=seeds, carried=st.booleans())
def test_streams_in_any_order(
    case: Case, dtype: torch.dtype, data: st.DataObject, seed: int, carried: bool
) -> None:
    """Three rows read, are scored, begin anew and change places with what waits: each stream as the
    model reads it alone, wherever its documents begin. No other row changes, to the last digit, nor
    does a memory that the reader was given or has returned."""
    model, tol = case.shared_model(dtype), TOLERANCE[dtype]
    empty = model.initial_memory(1)
    streams = [rows_of(some_memory(model, 3, seed), n % 3) if carried else empty for n in range(5)]
    rows, waiting, taken = [0, 1, 2], [3, 4], []
    start = concatenate(streams[:3])
    copied, reader = start.map(Tensor.clone), model.reader(start)
    acts = st.lists(st.sampled_from(ACTS), min_size=3, max_size=7)
    for n, act in enumerate(["read", *data.draw(acts, label="acts"), "read"]):
        before = reader.memory
        if act == "read":
            tokens = text(3, data.draw(st.sampled_from([1, 1, 2, 5, 7]), label="T"), seed + n)
            options: dict[str, Any] = {}
            if scored := data.draw(st.booleans(), label="scored"):
                options["targets"] = (tokens + 1) % VOCABULARY
            if data.draw(st.booleans(), label="documents"):
                options["starts"] = text(*tokens.shape, seed - n) < 2
            found = reader.read(tokens, **options)
            for row, stream in enumerate(rows):
                own = {name: each[[row]] for name, each in options.items()}
                out = model(tokens[[row]], streams[stream], **own)
                streams[stream] = out.memory
                expected = out.losses if scored else out.logits
                assert_same(found[[row]], expected, tol, f"losses or logits of row {row}")
        elif act == "reset":
            mask = data.draw(st.lists(st.booleans(), min_size=3, max_size=3), label="mask")
            reader.reset(mask if n % 2 else torch.tensor(mask))
            assert_memories_equal(reader.memory, before.reset(mask))
            for row in [row for row in range(3) if mask[row]]:
                streams[rows[row]] = empty
        elif act == "replace":
            leaving = data.draw(st.permutations(range(3)), label="rows")[: n % 4]
            kept = reader.select(leaving)
            assert_memories_equal(kept, before.select(leaving))
            for n_left, row in enumerate(leaving):
                streams[rows[row]] = rows_of(kept, n_left)
                rows[row], waiting = waiting[0], [*waiting[1:], rows[row]]
            coming = concatenate([streams[rows[row]] for row in leaving]) if leaving else kept
            given_one = coming.map(Tensor.clone)
            reader.replace(leaving if n % 2 else torch.tensor(leaving, dtype=torch.int64), coming)
            assert_memories_equal(coming, given_one)
            assert_memories_equal(reader.select(leaving), coming, 1e-12)
            others = [row for row in range(3) if row not in leaving]
            assert_memories_equal(reader.select(others), before.select(others))
        else:
            reader = model.reader(before)
        taken.append((reader.memory, concatenate([streams[stream] for stream in rows])))
    for ours, theirs in taken:
        assert_memories_equal(ours, theirs, tol)
    assert_memories_equal(start, copied)


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


@every_case
def test_what_is_not_finite_leaves_with_its_stream(case: Case) -> None:
    """Readers whose memory it would stay in say in which row it is."""
    model = case.shared_model()
    memory = some_memory(model, 2).map(
        lambda t: t.index_fill(0, torch.tensor(1), torch.nan) if t.is_floating_point() else t
    )
    refused: Any = contextlib.nullcontext()
    if isinstance(model.backbone, FastWeights | GatedDeltaNet):
        refused = pytest.raises(NonFiniteError, match="values of rows 1 are not finite")
    for length in (1, 3):
        reader = model.reader(memory)
        with refused:
            reader.read(text(2, length))
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
