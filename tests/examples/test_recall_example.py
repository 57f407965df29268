"""The driver of docs/recall.md: equal sizes, what is in reach, and a run from training to its row."""

from __future__ import annotations

import importlib.util

import pytest

import recall
import recall_models
from recall_task import Recall


def test_all_models_have_as_many_parameters() -> None:
    vocab_size = recall.PANELS["time"].task.vocab_size
    there = importlib.util.find_spec("transformers") is not None
    sizes = [
        sum(parameter.numel() for parameter in recall_models.made(name, vocab_size).parameters())
        for name in {*recall.PANELS["time"].models, *recall.PANELS["today"].models}
        if there or name not in ("mamba-2", "sliding-llama")
    ]
    assert max(sizes) < 1.02 * min(sizes)


@pytest.mark.parametrize("live", [(4,), (2, 4)])
def test_training_stops_in_time_and_reports(
    live: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    panel = recall_models.Panel(
        Recall(n_keys=4, n_values=2, longest=64), ("feedback",), live, (16, 64)
    )
    monkeypatch.setitem(recall.PANELS, "time", panel)
    monkeypatch.setattr(recall, "ROWS", 4)
    monkeypatch.setattr(recall.time, "process_time", iter(range(100)).__next__)
    job = {"panel": "time", "model": "feedback", "seed": 1, "rate": 2e-3, "seconds": 3}
    row = recall.train(job)
    assert row["tokens"] == 3 * 4 * recall.SEGMENT
    at, accuracies = zip(*row["curve"], strict=True)
    # By the number of live keys where that varies, else by half octaves.
    assert at == live if len(live) > 1 else at[:3] == (1, 2, 3)
    assert all(0 <= accuracy <= 1 for accuracy in [*accuracies, row["level"]])
