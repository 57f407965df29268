"""The learning rate of each update."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from command_line import refused
from memspan.errors import MemspanError
from memspan.training import metrics, start
from memspan.training.optimisers import learning_rate
from memspan.training.options import OptimConfig
from tiny_runs import OPTIONS, TEXT

PEAK, FLOOR, WARMUP, STEPS = 2e-3, 1e-4, 5, 105


def rates(schedule: Any, **options: Any) -> list[float]:
    optim = OptimConfig(schedule=schedule, warmup_steps=WARMUP, **options)
    found = [learning_rate(step, optim, STEPS) for step in range(STEPS)]
    assert found[:WARMUP] == pytest.approx([PEAK * (n + 1) / WARMUP for n in range(WARMUP)])
    return found[WARMUP:]


def test_cosine() -> None:
    """Bit for bit as it has always been: it is resumed."""
    assert rates("cosine") == [
        FLOOR + (PEAK - FLOOR) * (1 + math.cos(math.pi * (n / 100))) / 2 for n in range(100)
    ]


def test_linear() -> None:
    assert rates("linear") == pytest.approx([PEAK - (PEAK - FLOOR) * n / 100 for n in range(100)])
    assert rates("linear", min_learning_rate=0.0)[-1] == pytest.approx(PEAK / 100)
    assert rates("linear", min_learning_rate=1.0) == [PEAK] * 100


@pytest.mark.parametrize(("given", "n_decay"), [(None, 21), (10, 10), (100, 100), (1000, 100)])
def test_warmup_stable_decay(given: int | None, n_decay: int) -> None:
    """A fifth of all steps decays, or as many as are asked for and warm-up leaves."""
    found = rates("warmup-stable-decay", decay_steps=given)
    assert found[: 100 - n_decay] == [PEAK] * (100 - n_decay)
    falling = [PEAK - (PEAK - FLOOR) * n / n_decay for n in range(n_decay)]
    assert found[100 - n_decay :] == pytest.approx(falling)


def test_schedules_without_an_end() -> None:
    assert rates("constant") == [PEAK] * 100
    slow = OptimConfig(schedule="inverse-sqrt", warmup_steps=4)
    assert learning_rate(15, slow, STEPS) == learning_rate(15, slow, 16) == pytest.approx(1e-3)


def test_a_run_follows_its_budget(own_folders: Path) -> None:
    Path("text.txt").write_text(TEXT)
    optim = OptimConfig(schedule="warmup-stable-decay", warmup_steps=1, decay_steps=2)
    # Six updates of eight tokens, the last two of which decay.
    loop = dataclasses.replace(OPTIONS.train, steps=None, max_tokens=48)
    start.train(dataclasses.replace(OPTIONS, optim=optim, train=loop), Path("r"))
    records = metrics.read(Path("r/metrics.jsonl"))
    (last,) = [record["learning_rate"] for record in records if "learning_rate" in record]
    assert last == pytest.approx((PEAK + FLOOR) / 2)


def test_a_decay_without_its_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MemspanError, match="decay_steps is for the schedule warmup-stable-decay"):
        OptimConfig(decay_steps=5)
    wsd = ["--optim.schedule", "warmup-stable-decay", "--optim.decay-steps"]
    assert "decay_steps must be at least 1, not 0" in refused(capsys, "train", *wsd, "0")
    line = refused(capsys, "train", "--optim.schedule", "wsd")
    assert "must be one of cosine, linear, warmup-stable-decay, inverse-sqrt, constant" in line
