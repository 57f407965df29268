"""A reader that steps many environments at once."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from architectures import CASES, ONE_OF_EACH, Case
from golden import assert_same
from memspan.errors import NonFiniteError
from memspan.memory import Memory
from memspan.models import FastWeights
from readings import assert_memories_equal, every_case, fields, some_memory, text

ROWS, STEPS = 4, 16
ENDS = torch.zeros(STEPS, ROWS, dtype=torch.bool)
ENDS[[2, 9, 10, 12], [1, 0, 0, 2]] = ENDS[13, [0, 3]] = True
"""Where an episode begins: rows of every age, one that is reset twice running, one never before."""


def observations(case: Case) -> Tensor:
    return torch.randn(STEPS, ROWS, case.backbone.d_model, dtype=torch.float64)


@every_case
def test_a_step_reads_one_vector_of_every_row(case: Case) -> None:
    """As :meth:`read` does, which other tests look at; with resets, and a memory put into two rows.
    Nothing records gradients: a reader that did would keep all that it has read."""
    model, x = case.shared_model(), observations(case).requires_grad_()
    stepped, read = (model.backbone.reader(some_memory(model, ROWS), ROWS) for _ in range(2))
    for t in range(STEPS):
        for each in (stepped, read):
            each.reset(ENDS[t])
            if t == 4:
                each.replace([3, 1], some_memory(model, 2, seed=7))
        hidden, expected = stepped.step(x[t]), read.read(x[t][:, None])[:, 0]
        assert_same(hidden, expected, 1e-9, f"step {t}")
        assert hidden.shape == x[t].shape
        assert not hidden.requires_grad
        assert not expected.requires_grad
    assert_memories_equal(stepped.memory, read.memory, 1e-9)
    assert not any(t.requires_grad for t in fields(stepped.memory).values())
    assert not model.reader(read.memory).read(text(ROWS, 3)).requires_grad


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_what_is_not_finite_is_named_and_others_go_on(name: str) -> None:
    """Nothing has been read: with zeros in its place and the row reset, the others miss no step."""
    case = CASES[name]
    x = observations(case)
    reader, expected = (case.shared_model().backbone.reader(None, ROWS) for _ in range(2))
    for t in range(8):
        seen = x[t].clone()
        if t == 5:
            seen[1, 3], seen[2, 0] = torch.nan, torch.inf
            with pytest.raises(
                NonFiniteError, match=r"rows 1, 2 are not finite, so no row was read"
            ):
                reader.step(seen)
            broken = ~seen.isfinite().all(1)
            seen[broken] = 0
            reader.reset(broken.numpy())
        hidden, wanted = reader.step(seen), expected.step(x[t])
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
    given, counts = memory.select([3, 0]), memory.counts()
    model.to("meta")
    with monkeypatch.context() as patch:
        # Once, when it is made, a reader may wait.
        patch.setattr(type(memory), "counts", lambda _: counts)
        patch.setattr(FastWeights, "check_feature_map", lambda *_: None)
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
