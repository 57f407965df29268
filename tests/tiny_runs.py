"""A run of six steps, for tests of what may happen to it and to its folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from memspan.data.options import DataConfig
from memspan.models.transformer_xl.config import TransformerXLConfig
from memspan.runs import checkpoints
from memspan.runs.options import RunConfig
from memspan.training import metrics, updates
from memspan.training.options import OptimConfig, TrainConfig

TEXT = "memory is what remains of what was read. " * 30
OPTIONS = RunConfig(
    model=TransformerXLConfig(n_layers=1, d_model=8, n_heads=2, d_ff=8, memory_length=4),
    data=DataConfig(corpus="text.txt"),
    optim=OptimConfig(warmup_steps=2),
    train=TrainConfig(
        steps=6,
        batch_size=2,
        segment_length=4,
        evaluate_every=3,
        evaluate_tokens=32,
        save_every=2,
        sample_tokens=0,
        device="cpu",
    ),
)


class PowerCut(BaseException):
    """No handler of ours catches it, as none runs when the power goes."""


def power_cut() -> None:
    raise PowerCut


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def at_step(step: int, act: Callable[[], object]) -> Iterator[None]:
    """Inside, ``act`` is called once, before the update that follows ``step`` updates."""
    original, left = updates.Updater.update, [act]

    def update(self: updates.Updater) -> torch.Tensor | None:
        if self.state.step == step and left:
            left.pop()()
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates.Updater, "update", update)
        yield


@contextmanager
def cut_at(step: int) -> Iterator[None]:
    """Inside, the power goes before that update."""
    with at_step(step, power_cut), pytest.raises(PowerCut):
        yield


def step_of(folder: str | Path) -> int:
    """The step of the newest checkpoint."""
    return checkpoints.latest(Path(folder)).state["step"]


def assert_same(a: str | Path, b: str | Path) -> None:
    """The newest checkpoints are alike bit for bit, and so are the validations."""
    ours, theirs = (checkpoints.latest(Path(folder)).load() for folder in (a, b))
    assert ours.state == theirs.state | {"files": ours.state["files"]}
    for mine, other in ((ours.weights, theirs.weights), (ours.training, theirs.training)):
        assert mine.keys() == other.keys()
        for name in mine:
            assert torch.equal(mine[name], other[name]), name
    assert validations(a) == validations(b)


def validations(folder: str | Path) -> list[tuple[int, Any]]:
    """Steps and losses of the validations, in order."""
    name = "validation_nats_per_token"
    records = metrics.read(Path(folder) / "metrics.jsonl")
    return [(record["step"], record[name]) for record in records if name in record]
