"""Retrieval tasks: what is drawn, and that the answer is the last value of the key."""

from __future__ import annotations

import pytest
import torch

from retrieval import Retrieval


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("repeat", [False, True])
def test_answers_are_the_last_values(repeat: bool) -> None:
    task = Retrieval(7, repeat=repeat)
    for batch in (task.batch(50, generator()), task.every_query(generator(1))):
        rows = zip(batch.keys.tolist(), batch.values.tolist(), strict=True)
        for (keys, values), query, answer in zip(rows, batch.query, batch.answer, strict=True):
            assert dict(zip(keys, values, strict=True))[int(query)] == answer


def test_capacity_has_every_key_and_value_once() -> None:
    batch = Retrieval(9).batch(20, generator())
    assert batch.keys.shape == (20, 9)
    for drawn in (batch.keys, batch.values):
        assert torch.equal(drawn.sort(1).values, torch.arange(9).expand(20, 9))
        assert len({tuple(row) for row in drawn.tolist()}) > 10
    assert len(set(batch.query.tolist())) > 3


def test_updates_repeat_keys_in_twice_as_many_pairs() -> None:
    task = Retrieval(9, repeat=True)
    batch = task.batch(20, generator())
    assert batch.keys.shape == (20, 18)
    first = (batch.keys == batch.query[:, None]).int().argmax(1, keepdim=True)
    assert (batch.values.gather(1, first)[:, 0] != batch.answer).any()
    every = task.every_query(generator())
    assert every.query.tolist() == sorted(set(every.keys[0].tolist()))
