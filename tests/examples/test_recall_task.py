"""Recall over distance: distances by brute force, their distribution, answers that are hidden."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from recall_task import NOT_SCORED, Recall, RecallSegment

SMALL = Recall(n_keys=5, n_values=3, longest=64)


def joined(segments: list[RecallSegment]) -> RecallSegment:
    parts = zip(*((s.tokens, s.targets, s.distances) for s in segments), strict=True)
    return RecallSegment(*(torch.cat(list(part), 1) for part in parts))


@pytest.mark.parametrize(
    ("task", "live"), [(SMALL, None), (SMALL, [1, 2, 5]), (Recall(n_keys=1, longest=8), None)]
)
def test_answers_and_distances_by_brute_force(task: Recall, live: Sequence[int] | None) -> None:
    stream = task.stream(3, seed=0, live=live)
    # The longest distance grows, as in a curriculum.
    read = joined([stream.next(100, longest=min(task.longest, 8 << i)) for i in range(5)])
    asked = 0
    for row in range(3):
        tokens = read.tokens[row].tolist()
        written = {}
        for t, token in enumerate(tokens):
            target = int(read.targets[row, t])
            distance = int(read.distances[row, t])
            if token < task.filler:
                written[token // task.n_values] = t
            if not task.first_question <= token < task.first_answer:
                assert (target, distance) == (NOT_SCORED, 0)
                continue
            last = written[token - task.first_question]
            assert distance == t - last <= min(task.longest, 8 << t // 100)
            assert target == task.first_answer + tokens[last] % task.n_values
            asked += 1
    assert asked > 600


def test_distances_are_log_uniform() -> None:
    distances = Recall().stream(8, seed=0).next(8192).distances[:, 4096:]
    octave = distances[distances > 0].double().log2().floor()
    shares = 12 * torch.stack([(octave == i).double().mean() for i in range(12)])
    assert (shares[5:] - 1).abs().max() < 0.1, shares
    assert (shares[2:5] - 1.25).abs().max() < 0.3, shares
    assert shares[:2].min() > 0.15


def test_streams_follow_from_their_seed_however_they_are_cut() -> None:
    whole = SMALL.stream(4, seed=3).next(200)
    stream = SMALL.stream(4, seed=3)
    parts = joined([stream.next(n) for n in (1, 63, 100, 36)])
    for name in ("tokens", "targets", "distances"):
        assert torch.equal(getattr(whole, name), getattr(parts, name))
    assert not torch.equal(whole.tokens, SMALL.stream(4, seed=4).next(200).tokens)


def test_mistakes_are_reported() -> None:
    with pytest.raises(ValueError, match="shares"):
        Recall(writes=0.6, questions=0.6)
    with pytest.raises(ValueError, match="n_values"):
        Recall(n_values=0)
    with pytest.raises(ValueError, match=r"live must lie in 1 \.\. 5"):
        SMALL.stream(2, seed=0, live=6)
