"""Streams: what they read, how they resume, and what they refuse."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memspan.data.streams import START, Streams, evaluation_segments
from memspan.errors import MemspanError
from memspan.nn import NOT_SCORED

TEXT = np.arange(200, dtype=np.uint8)
STARTS = np.array([0, 11, 60, 61, 150])


@given(st.integers(0, 40), st.integers(1, 40))
def test_a_resumed_stream_is_the_uninterrupted_one(steps: int, more: int) -> None:
    whole, first = Streams(TEXT, 3, 7, STARTS), Streams(TEXT, 3, 7, STARTS)
    for _ in range(steps):
        whole.next()
        first.next()
    second = Streams(TEXT, 3, 7, STARTS)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(more):
        a, b = whole.next(), second.next()
        assert torch.equal(a.inputs, b.inputs)
        assert torch.equal(a.targets, b.targets)
        assert (a.starts is None) == (b.starts is None)
        assert a.starts is None or (b.starts is not None and torch.equal(a.starts, b.starts))
    assert whole.epoch == second.epoch == (steps + more) // whole.n_segments


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"position": -1}, "not a stream position"),
        ({"position": 1.5}, "not a stream position"),
        ({"segment_length": 0}, "not a stream position"),
        ({"n_tokens": 7}, "is for n_tokens 7, not 200"),
    ],
)
def test_a_spoilt_position_is_refused(change: dict[str, Any], line: str) -> None:
    streams = Streams(TEXT, 2, 5)
    streams.next()
    with pytest.raises(MemspanError, match=line):
        streams.load_state_dict(streams.state_dict() | change)
    assert streams.position == 1


@pytest.mark.parametrize(("rows", "length"), [(0, 5), (5, 0)])
def test_sizes_below_one_are_refused(rows: int, length: int) -> None:
    with pytest.raises(MemspanError, match="at least 1"):
        next(evaluation_segments(TEXT, rows, length))


def test_one_row_is_scored_as_documented() -> None:
    tokens = np.array([5, 6, 7, 8, 9], np.uint16)
    segments = list(evaluation_segments(tokens, 1, 2))
    assert [s.inputs.tolist() for s in segments] == [[[START, 5]], [[6, 7]], [[8]]]
    assert [s.targets.tolist() for s in segments] == [[[5, 6]], [[7, 8]], [[9]]]
    assert all(s.starts is None for s in segments)


@given(st.integers(1, 5), st.integers(1, 9), st.integers(30, 200))
def test_rows_continue_and_targets_follow(rows: int, length: int, n: int) -> None:
    text = np.arange(n, dtype=np.uint8)
    if (n - 1) // rows < length:
        with pytest.raises(MemspanError, match="too few"):
            Streams(text, rows, length)
        return
    streams = Streams(text, rows, length)
    first = streams.next()
    assert torch.equal(first.targets, first.inputs + 1)
    assert first.inputs[:, 0].tolist() == [b * ((n - 1) // rows) for b in range(rows)]
    assert first.starts is None
    before = first
    for _ in range(streams.n_segments - 1):
        segment = streams.next()
        assert torch.equal(segment.inputs[:, 0], before.targets[:, -1])
        before = segment
    again = streams.next()
    assert torch.equal(again.inputs, first.inputs)
    assert again.starts is not None
    assert again.starts[:, 0].all()
    assert not again.starts[:, 1:].any()


def test_documents_begin_with_start() -> None:
    """Every token of every document is a target, the first after START."""
    text = np.arange(100, 140, dtype=np.uint8)
    # The third document is empty, and so is the last.
    streams = Streams(text, 2, 5, np.array([0, 7, 30, 30, 40]))
    found = [streams.next() for _ in range(5)]
    targets = torch.cat([segment.targets for segment in found[:4]], 1)
    assert targets.flatten().tolist() == text.tolist()
    inputs = torch.cat([segment.inputs for segment in found[:4]], 1).flatten()
    begins = torch.tensor([0, 7, 30])
    assert (inputs == START).nonzero().flatten().tolist() == begins.tolist()
    rest = torch.ones(40, dtype=torch.bool).index_fill(0, begins, False)
    assert torch.equal(inputs[rest], targets.flatten()[rest] - 1)
    marks = [None if s.starts is None else s.starts.nonzero().tolist() for s in found]
    # The text again: for every row.
    assert marks == [[[0, 0]], [[0, 2]], [[1, 0]], None, [[0, 0], [1, 0]]]


@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 20), st.booleans())
def test_every_token_is_scored_once(n: int, rows: int, length: int, documents: bool) -> None:
    text = np.arange(100, 100 + n, dtype=np.uint16)
    if rows > n or length > n:
        with pytest.raises(MemspanError, match="lower"):
            list(evaluation_segments(text, rows, length))
        return
    scored, last = [], None
    starts = np.array([0, n // 2, n // 2, n])
    for segment in evaluation_segments(text, rows, length, starts if documents else None):
        inputs, targets = segment.inputs, segment.targets
        mask = targets != NOT_SCORED
        scored += targets[mask].tolist()
        first = (targets == 100) | (targets == 100 + n // 2) & documents
        assert torch.equal(inputs[mask], targets.sub(1).masked_fill(first, START)[mask])
        marked = torch.zeros_like(mask) if segment.starts is None else segment.starts
        assert torch.equal(marked, first & documents)
        if last is not None:
            goes_on = (mask & ~first)[:, 0]
            assert torch.equal(inputs[:, 0][goes_on], last[goes_on])
        last = targets[:, -1]
    assert sorted(scored) == text.tolist()
