"""Readers give what their models give, whatever rows end, begin and go on meanwhile; also those that
step many environments at once."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from architectures import CASES, ONE_OF_EACH, VOCABULARY, Case
from golden import assert_same
from memspan.errors import MemspanError, NonFiniteError
from memspan.memory import Memory, concatenate
from memspan.models import LanguageModel
from memspan.models.fast_weights.reader import FastWeightsReader
from memspan.models.matrix.reader import MatrixReader
from readings import (
    TOLERANCE,
    assert_memories_equal,
    every_case,
    fields,
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
    model = case.shared_model(dtype)
    tol = TOLERANCE[dtype]
    empty = model.initial_memory(1)
    streams = [rows_of(some_memory(model, 3, seed), n % 3) if carried else empty for n in range(5)]
    rows = [0, 1, 2]
    waiting = [3, 4]
    taken = []
    start = concatenate(streams[:3])
    copied = start.map(Tensor.clone)
    reader = model.reader(start)
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
    reader = model.reader(batch_size=2)
    memory = None
    taken = []
    for n, length in enumerate([1, 12, 3, 16, 7] * 2):
        segment = text(2, length, n)
        out = model(segment, memory)
        memory = out.memory
        assert_same(reader.read(segment), out.logits, 1e-9, f"logits of call {n}")
        taken.append((reader.memory, memory))
    for ours, expected in taken:
        assert_memories_equal(ours, expected, 1e-9)


@every_case
def test_non_finite_values_leave_with_their_stream(case: Case) -> None:
    """Readers whose memory it would stay in say in which row it is."""
    model = case.shared_model()
    memory = some_memory(model, 2).map(
        lambda t: t.index_fill(0, torch.tensor(1), torch.nan) if t.is_floating_point() else t
    )
    refused: Any = contextlib.nullcontext()
    if isinstance(model.backbone.reader(None, 1), FastWeightsReader | MatrixReader):
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


# ----- Steps of many environments


ROWS = 4
STEPS = 16
ENDS = torch.zeros(STEPS, ROWS, dtype=torch.bool)
ENDS[[2, 9, 10, 12], [1, 0, 0, 2]] = ENDS[13, [0, 3]] = True
"""Where an episode begins: rows of every age, one that is reset twice running, one never before."""


def observations(case: Case) -> Tensor:
    return torch.randn(STEPS, ROWS, case.backbone.d_model, dtype=torch.float64)


@pytest.mark.gradients
@every_case
def test_a_step_reads_one_vector_of_every_row(case: Case) -> None:
    """As :meth:`read` does, which other tests look at; with resets, and a memory put into two rows.
    Nothing records gradients: a reader that did would keep all that it has read."""
    model = case.shared_model()
    x = observations(case).requires_grad_()
    stepped, read = (model.backbone.reader(some_memory(model, ROWS), ROWS) for _ in range(2))
    for t in range(STEPS):
        for each in (stepped, read):
            each.reset(ENDS[t])
            if t == 4:
                each.replace([3, 1], some_memory(model, 2, seed=7))
        hidden = stepped.step(x[t])
        expected = read.read(x[t][:, None])[:, 0]
        assert_same(hidden, expected, 1e-9, f"step {t}")
        assert hidden.shape == x[t].shape
        assert not hidden.requires_grad
        assert not expected.requires_grad
    assert_memories_equal(stepped.memory, read.memory, 1e-9)
    assert not any(t.requires_grad for t in fields(stepped.memory).values())
    assert not model.reader(read.memory).read(text(ROWS, 3)).requires_grad


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_non_finite_rows_are_named_and_others_go_on(name: str) -> None:
    """Nothing has been read: with zeros in its place and the row reset, the others miss no step."""
    case = CASES[name]
    x = observations(case)
    reader, expected = (case.shared_model().backbone.reader(None, ROWS) for _ in range(2))
    for t in range(8):
        seen = x[t].clone()
        if t == 5:
            seen[1, 3] = torch.nan
            seen[2, 0] = torch.inf
            with pytest.raises(
                NonFiniteError, match=r"rows 1, 2 are not finite, so no row was read"
            ):
                reader.step(seen)
            broken = ~seen.isfinite().all(1)
            seen[broken] = 0
            reader.reset(broken.numpy())
        hidden = reader.step(seen)
        wanted = expected.step(x[t])
        assert_same(hidden[[0, 3]], wanted[[0, 3]], 1e-12, f"step {t}")
    assert_memories_equal(reader.select([0, 3]), expected.select([0, 3]), 1e-12)
    assert reader.memory.tokens_seen.tolist() == [8, 3, 3, 8]
    # What overflows a sum is finite.
    reader.step(torch.full((ROWS, 8), 1e37, dtype=torch.float64))


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_readers_do_not_wait_for_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values on device ``meta`` do not exist, so whatever waited for one would fail."""
    # It is no device of torch.autocast.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    model = CASES[name].model()
    memory: Memory = model.initial_memory(ROWS)
    given = memory.select([3, 0])
    counts = memory.counts()
    model.to("meta")
    with monkeypatch.context() as patch:
        # Once, when it is made, a reader may wait.
        patch.setattr(type(memory), "counts", lambda _: counts)
        reader = model.reader(memory.to("meta"))
        steps = model.backbone.reader(memory.to("meta"), ROWS)
    x = torch.zeros(ROWS, 8, dtype=torch.float64, device="meta")
    for t in range(8):
        for each in (reader, steps):
            each.reset(ENDS[t])
            if t == 4:
                each.replace([3, 1], given)
        assert steps.step(x).is_meta
        length = (7, 1, 3, 1)[t % 4]
        logits = reader.read(torch.zeros(ROWS, length, dtype=torch.int64, device="meta"))
        with pytest.raises(RuntimeError, match="meta"):
            logits.sum().item()
    assert reader.select([1, 2]).tokens_seen.is_meta
    assert steps.memory.tokens_seen.is_meta


def test_a_reader_is_refused_while_another_model_trains_its_backbone() -> None:
    """It would drop what it reads."""
    model = LanguageModel(11, dataclasses.replace(CASES["xl-segment"].backbone, dropout=0.5)).eval()
    other = LanguageModel(11, CASES["xl-segment"].backbone)
    other.backbone = model.backbone
    reader = model.reader(batch_size=2)
    other.train()
    with pytest.raises(MemspanError, match=r"needs model\.eval\(\), and its backbone's"):
        reader.read(text(2, 3))
