"""Streams against their definition: which token is where, in which row, and what begins there."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from memspan.errors import MemspanError
from memspan.lab.data.streams import START, Segment, Streams, evaluation_segments
from memspan.nn import NOT_SCORED

TEXT = np.arange(200, dtype=np.uint8)
STARTS = np.array([0, 11, 60, 61, 150])
ENDS = st.lists(st.integers(0, 60), max_size=6)
# Some documents are empty, the last one too.
DOCUMENTS = st.none() | ENDS.map(lambda ends: [0, *sorted(ends)])


def assert_reads(
    segment: Segment, first: list[int], length: int, n: int, starts: list[int] | None, again: bool
) -> None:
    """A segment of a text of ``n`` tokens ``100 + p``, whose targets are the ``length`` from
    ``first`` on in each row; ``again``: the text begins anew."""
    positions = np.array(first)[:, None] + np.arange(length)
    inside = positions < n
    begins = inside & np.isin(positions, [0, *(starts or [])])
    targets = np.where(inside, 100 + positions, NOT_SCORED)
    assert segment.targets.tolist() == targets.tolist()
    inputs = np.where(begins, START, 99 + positions)
    assert segment.inputs.numpy()[inside].tolist() == inputs[inside].tolist()
    marks = begins & (starts is not None)
    marks[:, 0] |= again
    found = None if segment.starts is None else segment.starts.tolist()
    assert found == (marks.tolist() if marks.any() else None)


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 9), DOCUMENTS)
@example(40, 2, 5, [0, 7, 30, 30, 40])
@example(41, 2, 5, None)
@example(10, 2, 5, None)
def test_rows_are_read_side_by_side_and_again(
    n: int, rows: int, length: int, starts: list[int] | None
) -> None:
    """The first token is only an input if there are no documents."""
    text = np.arange(100, 100 + n, dtype=np.uint8)
    skipped = int(starts is None)
    of_row = (n - skipped) // rows
    if of_row < length:
        with pytest.raises(MemspanError, match="too few"):
            Streams(text, rows, length)
        return
    streams = Streams(text, rows, length, None if starts is None else np.array(starts))
    n_segments = of_row // length
    for number in range(2 * n_segments + 1):
        at = skipped + number % n_segments * length
        first = [row * of_row + at for row in range(rows)]
        again = number > 0 and at == skipped
        assert_reads(streams.next(), first, length, n, starts, again)


@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 20), DOCUMENTS)
@example(5, 1, 2, None)
@example(5, 0, 2, None)
@example(5, 2, 0, None)
@example(5, 6, 2, None)
@example(5, 2, 6, None)
@example(40, 3, 5, [0, 20, 20, 40])
def test_every_token_is_scored_once(
    n: int, rows: int, length: int, starts: list[int] | None
) -> None:
    text = np.arange(100, 100 + n)
    begins = None if starts is None else np.array(starts)
    if not (1 <= rows <= n and 1 <= length <= n):
        with pytest.raises(MemspanError, match="lower" if rows and length else "at least 1"):
            list(evaluation_segments(text, rows, length, begins))
        return
    of_row = -(-n // rows)
    segments = list(evaluation_segments(text, rows, length, begins))
    for segment, at in zip(segments, range(0, of_row, length), strict=True):
        first = [row * of_row + at for row in range(rows)]
        assert_reads(segment, first, min(length, of_row - at), n, starts, again=False)


@given(st.integers(0, 40), st.integers(1, 40))
@example(20, 5)
def test_a_resumed_stream_is_the_uninterrupted_one(steps: int, more: int) -> None:
    whole = Streams(TEXT, 3, 7, STARTS)
    first = Streams(TEXT, 3, 7, STARTS)
    for _ in range(steps):
        whole.next()
        first.next()
    second = Streams(TEXT, 3, 7, STARTS)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(more):
        torch.testing.assert_close(vars(whole.next()), vars(second.next()), rtol=0, atol=0)
    assert whole.state_dict() == second.state_dict()
    assert whole.epoch == (steps + more) // whole.n_segments


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
