"""Tasks for states: parity and products by hand, questions about keys, their gaps."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

import synthetic
from synthetic import NOT_SCORED, PAIRS, PERMUTATIONS, WORDS


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_parity_counts_the_bits_so_far() -> None:
    tokens, targets = synthetic.parity(8, 40, drawn())
    for bits, answers in zip(tokens.tolist(), targets.tolist(), strict=True):
        assert answers == [2 + sum(bits[: t + 1]) % 2 for t in range(40)]
    assert set(targets.flatten().tolist()) == {2, 3}


def test_s3_applies_one_permutation_after_another() -> None:
    tokens, targets = synthetic.s3(8, 40, drawn())
    for words, answers in zip(tokens.tolist(), targets.tolist(), strict=True):
        things = ["a", "b", "c"]
        found = []
        for word in words:
            moved = dict(zip(PERMUTATIONS[word], things, strict=True))
            things = [moved[place] for place in range(3)]
            found.append("".join(things))
        # Equal arrangements have equal answers, different ones different answers.
        assert len({*zip(found, answers, strict=True)}) == len({*found}) == len({*answers})
        assert min(answers) >= 6
    assert set(targets.flatten().tolist()) == set(range(6, 12))


def test_the_order_of_a_word_in_s3_matters() -> None:
    tokens, targets = synthetic.s3(64, 2, drawn())
    after = {
        tuple(pair): int(answer)
        for pair, answer in zip(tokens.tolist(), targets[:, 1], strict=True)
    }
    swapped = [(pair, pair[::-1]) for pair in after if pair[::-1] in after]
    assert any(after[pair] != after[other] for pair, other in swapped)


def test_mqar_asks_for_each_key_once() -> None:
    tokens, targets = synthetic.mqar(50, 64, drawn())
    for row, answers in zip(tokens.tolist(), targets.tolist(), strict=True):
        value = dict(zip(row[0 : 2 * PAIRS : 2], row[1 : 2 * PAIRS : 2], strict=True))
        assert len(value) == PAIRS
        assert all(1 <= key < WORDS // 2 <= answer < WORDS for key, answer in value.items())
        asked = [t for t, answer in enumerate(answers) if answer != NOT_SCORED]
        assert min(asked) >= 2 * PAIRS
        assert [value[row[t]] for t in asked] == [answers[t] for t in asked]
        assert {row[t] for t in asked} == set(value)
        assert all(t % 2 == 0 for t in asked)


def test_gaps_in_mqar_follow_the_power_law() -> None:
    _, targets = synthetic.mqar(4000, 64, drawn())
    asked = (targets != NOT_SCORED).double().mean(0)[2 * PAIRS :: 2]
    assert asked.sum() == pytest.approx(PAIRS)
    # Eight are drawn of 24 without repetition, which lifts the far ones above the law itself.
    assert all(near > far for near, far in pairwise(asked[:8].tolist()))
    assert asked[0] > 0.9
    assert asked[-1] < 0.2


def test_pictures_are_drawn_of_the_tasks_that_were_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        {"task": task, "model": model, "right": {"32": right, "64": right / 2}}
        for task in ("mqar", "parity", "s3")
        for model, right in (("kda", 0.5), ("lstm", 1.0))
    ]
    synthetic.pictures(rows, tmp_path, PAIRS, WORDS // 2)
    assert {file.name for file in tmp_path.iterdir()} == {
        "mqar.png",
        "mqar-dark.png",
        "states.png",
        "states-dark.png",
    }
    for file in tmp_path.iterdir():
        file.unlink()
    synthetic.pictures(rows[:4], tmp_path, PAIRS, WORDS // 2)
    assert {file.name for file in tmp_path.iterdir()} == {"mqar.png", "mqar-dark.png"}
