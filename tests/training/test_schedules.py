"""Training over its steps: learning rates, lengths of segments, and its end."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import memspan
import tiny_runs
from command_line import refused
from memspan.errors import MemspanError
from memspan.lab import cli
from memspan.lab.data.streams import Streams
from memspan.lab.runs import checkpoints, history
from memspan.lab.runs.options import RunConfig, load_config
from memspan.lab.training import metrics, start
from memspan.lab.training.optimisers import learning_rate
from memspan.lab.training.options import OptimConfig, TrainConfig
from tiny_runs import OPTIONS, TEXT

pytestmark = pytest.mark.usefixtures("tiny_text")
PEAK = 2e-3
FLOOR = 1e-4


def options(**budget: Any) -> RunConfig[Any]:
    return tiny_runs.options(**{"steps": None} | budget)


def falling(n: int, floor: float = FLOOR) -> list[float]:
    return [PEAK - (PEAK - floor) * step / n for step in range(n)]


@pytest.mark.parametrize(
    ("schedule", "more", "expected"),
    [
        ("linear", {}, falling(100)),
        ("linear", {"min_learning_rate": 0.0}, falling(100, floor=0.0)),
        ("linear", {"min_learning_rate": 1.0}, [PEAK] * 100),
        # A fifth of all steps decays, or as many as are asked for and warm-up leaves.
        ("warmup-stable-decay", {}, [PEAK] * 79 + falling(21)),
        ("warmup-stable-decay", {"decay_steps": 10}, [PEAK] * 90 + falling(10)),
        ("warmup-stable-decay", {"decay_steps": 100}, falling(100)),
        ("warmup-stable-decay", {"decay_steps": 1000}, falling(100)),
        ("constant", {}, [PEAK] * 100),
        ("inverse-sqrt", {}, [PEAK * math.sqrt(5 / (step + 6)) for step in range(100)]),
    ],
    ids=lambda value: "" if isinstance(value, list) else str(value),
)
def test_rates_follow_their_schedule(
    schedule: Any, more: dict[str, Any], expected: list[float]
) -> None:
    optim = OptimConfig(schedule=schedule, warmup_steps=5, **more)
    warmup = [PEAK * n / 5 for n in range(1, 6)]
    assert [learning_rate(n, optim, 105) for n in range(105)] == pytest.approx(warmup + expected)


def test_cosine() -> None:
    """Bit for bit as it has always been: it is resumed."""
    assert [learning_rate(n, OptimConfig(warmup_steps=5), 105) for n in range(5, 105)] == [
        FLOOR + (PEAK - FLOOR) * (1 + math.cos(math.pi * (n / 100))) / 2 for n in range(100)
    ]


# Segments that grow: 2, 4 and 8 tokens for four steps each, then 10 for good.
GROWING = TrainConfig(
    steps=20, batch_size=2, segment_length=10, first_segment_length=2, curriculum_steps=12
)


def test_lengths_double_in_equal_shares() -> None:
    lengths = [GROWING.segment_length_at(step) for step in range(20)]
    assert lengths == [2] * 4 + [4] * 4 + [8] * 4 + [10] * 8
    # With accumulation that changes, too.
    grows = dataclasses.replace(GROWING, accumulate=2, accumulate_later=3, accumulate_from=6)
    assert [grows.segments_per_update(n) for n in range(20)] == [2] * 6 + [3] * 14
    for loop in (GROWING, grows, TrainConfig(segment_length=10)):
        read = [loop.segment_length_at(n) * loop.segments_per_update(n) for n in range(20)]
        assert [loop.tokens_read(n) for n in range(21)] == [sum(read[:n]) for n in range(21)]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30))
@example([25, 25, 2, 4, 8, 10, 10, 10, 10, *[6] * 7, 4, 45])
def test_streams_go_on_where_they_are(lengths: list[int]) -> None:
    """Segments of different lengths join without a gap; a pass that cannot hold one starts again."""
    streams = Streams(np.arange(101), 2, lengths[0])
    offset = 0
    epoch = 0
    for before, length in pairwise([lengths[0], *lengths]):
        streams.set_segment_length(length)
        # Of the 50 tokens of a row.
        if offset + max(before, length) > 50:
            offset = 0
            epoch = epoch + 1
        assert (streams.offset, streams.epoch) == (offset, epoch)
        segment = streams.next()
        assert segment.inputs.tolist() == [
            [row + offset + n for n in range(length)] for row in (0, 50)
        ]
        assert (segment.starts is not None) == (offset == 0 < epoch)
        assert segment.starts is None or segment.starts[:, 0].all()
        offset += length


def test_a_curriculum_that_ends_above_the_corpus() -> None:
    """Refused at the start, not when it gets there."""
    grows = {"segment_length": 5000, "first_segment_length": 2, "curriculum_steps": 5}
    with pytest.raises(MemspanError, match=r"too few.*segment-length"):
        start.train(options(steps=6, **grows), Path("run"))
    assert not Path("run").exists()


# How long a run trains: so many steps, tokens, or times through its text.


def test_tokens_are_at_most_so_many() -> None:
    # An update reads two rows of four.
    for tokens, steps in ((8, 1), (15, 1), (16, 2), (10**15, 125 * 10**12)):
        assert options(max_tokens=tokens).train.updates(1) == steps
    grows = {"accumulate_later": 3, "accumulate_from": 2}
    assert options(max_tokens=16 + 24 * 5, **grows).train.updates(1) == 7
    longer = {"first_segment_length": 2, "curriculum_steps": 4}
    assert options(max_tokens=4 * 4 + 8 * 3 + 7, **longer).train.updates(1) == 7


def test_epochs_are_passes_through_the_rows() -> None:
    # Rows of 10 are read by two segments of 4.
    for epochs, steps in ((1, 2), (0.1, 1), (1.5, 3), (1.51, 4), (3, 6)):
        assert options(epochs=epochs).train.updates(10) == steps
    assert options(epochs=1e300).train.updates(10) > 10**18
    Path("text.txt").write_text(TEXT[:400])
    start.train(options(epochs=1), Path("r"))
    streams = checkpoints.latest(Path("r")).state["streams"]
    # All of them, and no token twice.
    assert (streams["epoch"], streams["offset"]) == (1, 0)


def test_a_budget_that_is_given_replaces_another(capsys: pytest.CaptureFixture[str]) -> None:
    """The schedule of a preset, and that of the run to resume."""
    start.train(options(max_tokens=48), Path("r"))
    cli.main(["train", "--preset", "r/config.toml", "--train.steps", "2", "--out", "two"])
    assert load_config(Path("two")).train.max_tokens is None
    assert memspan.load("two").config.train.steps == 2
    # Six updates of eight tokens: so many steps has the schedule.
    found = [record.get("learning_rate") for record in metrics.read(Path("r/metrics.jsonl"))]
    assert found == [None, learning_rate(5, OPTIONS.optim, 6), None]
    line = refused(capsys, "train", "--resume", "r")
    assert "train.max_tokens is 48; to continue: " in line
    assert line.endswith("train --resume r --train.max-tokens 96")
    cli.main(["train", "--resume", "r", "--train.epochs=0.06"])
    changed = {"train.max_tokens": [48, None], "train.epochs": [None, 0.06]}
    assert history.read(Path("r"))[0].changed == changed
    assert "--train.epochs 0.12" in refused(capsys, "train", "--resume", "r")


def test_budgets_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert TrainConfig().steps == 1000
    assert TrainConfig(max_tokens=10**6).steps is None
    both = ["--train.steps", "5", "--train.epochs", "1"]
    assert "steps and epochs are different budgets" in refused(capsys, "train", *both)
    Path("p.toml").write_text("[train]\nmax_tokens = 5000\nepochs = 2\n")
    assert "max_tokens and epochs are" in refused(capsys, "train", "--preset", "p.toml")
    for flags, says in (
        (["--train.epochs", "0"], "epochs must be more than 0"),
        (["--train.epochs", "inf"], "epochs must be a finite number"),
        (["--train.max-tokens", "700"], "less than one update reads, 768: raise it"),
        (["--train.max-tokens", "0"], "less than one update"),
        (["--train.max-tokens", "x"], "--train.max-tokens takes an integer, not 'x'"),
    ):
        assert says in refused(capsys, "train", *flags)
