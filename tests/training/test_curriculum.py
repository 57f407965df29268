"""The training curriculum: segments that grow, streams that go on, runs that resume."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest

from memspan.data.options import DataConfig
from memspan.data.streams import Streams
from memspan.errors import MemspanError
from memspan.models.feedback.config import FeedbackConfig
from memspan.runs.options import RunConfig
from memspan.training import start
from memspan.training.options import TrainConfig

LOOP = TrainConfig(
    steps=20,
    batch_size=2,
    segment_length=10,
    first_segment_length=2,
    curriculum_steps=12,
    evaluate_every=0,
    evaluate_tokens=64,
    save_every=5,
    sample_tokens=0,
    device="cpu",
)


def config(**loop: object) -> RunConfig[FeedbackConfig]:
    return RunConfig(
        model=FeedbackConfig(n_layers=1, d_model=8, n_heads=2, d_ff=8, memory_length=6),
        architecture="feedback",
        data=DataConfig(corpus="text.txt", tokenizer="characters"),
        train=dataclasses.replace(LOOP, **loop),  # type: ignore[arg-type]
    )


@pytest.fixture(autouse=True)
def _text(own_folders: Path) -> None:
    words = random.Random(1).choices(["memory", "segment", "the", "of", "a\n"], k=400)
    Path("text.txt").write_text(" ".join(words))


def test_lengths_double_in_equal_shares() -> None:
    """2, 4 and 8 for four steps each, then 10 for good."""
    lengths = [LOOP.segment_length_at(step) for step in range(20)]
    assert lengths == [2] * 4 + [4] * 4 + [8] * 4 + [10] * 8
    for step in range(21):
        assert LOOP.tokens_read(step) == sum(lengths[:step])
    plain = TrainConfig(segment_length=10)
    assert [plain.segment_length_at(step) for step in (0, 999)] == [10, 10]
    assert plain.tokens_read(7) == 70


def test_tokens_are_counted_with_changing_accumulation() -> None:
    loop = dataclasses.replace(LOOP, accumulate=2, accumulate_later=3, accumulate_from=6)
    expected = sum(
        loop.segment_length_at(step) * loop.segments_per_update(step) for step in range(20)
    )
    assert loop.tokens_read(20) == expected


def test_streams_go_on_where_they_are() -> None:
    """Segments of different lengths join without a gap; a pass that cannot hold one starts again."""
    streams = Streams(np.arange(101), 2, 10)
    seen = []
    for length in (2, 4, 8, 10, 10, 10):
        streams.set_segment_length(length)
        segment = streams.next()
        assert segment.inputs.shape == (2, length)
        assert segment.starts is None
        seen += segment.inputs[1].tolist()
    assert seen == list(range(50, 94))
    # 44 of 50 tokens are read, ten more do not fit.
    assert streams.epoch == 1
    segment = streams.next()
    assert segment.inputs[:, 0].tolist() == [0, 50]
    assert segment.starts[:, 0].all()
    streams.set_segment_length(6)
    for _ in range(6):
        streams.next()
    # 46 of 50 are read, six more do not fit.
    assert (streams.offset, streams.epoch) == (0, 2)
    streams.next()
    streams.set_segment_length(45)
    assert (streams.offset, streams.epoch) == (0, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"first_segment_length": 11}, "over segment_length"),
        ({"first_segment_length": 0}, "at least 1"),
        ({"first_segment_length": None}, "set both"),
        ({"curriculum_steps": 0}, "set both"),
    ],
)
def test_a_curriculum_that_makes_no_sense(options: dict[str, int], message: str) -> None:
    with pytest.raises(MemspanError, match=message) as caught:
        dataclasses.replace(LOOP, **options)
    assert "\n" not in str(caught.value)


def test_a_curriculum_that_ends_above_the_corpus() -> None:
    """Refused at the start, not when it gets there."""
    with pytest.raises(MemspanError, match=r"too few.*segment-length") as caught:
        start.train(config(segment_length=5000), Path("run"))
    assert "\n" not in str(caught.value)
    assert not Path("run").exists()
