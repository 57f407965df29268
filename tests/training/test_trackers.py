"""Trackers get what metrics.jsonl gets, and are named where they are missing."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import MagicMock, call

import pytest

import tiny_runs
from memspan.errors import MemspanError
from memspan.lab import cli
from memspan.lab.runs.options import read_config, to_toml
from memspan.lab.training import metrics, start
from memspan.lab.training.metrics import TRACKERS

pytestmark = pytest.mark.usefixtures("tiny_text")


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """A stand-in for the package, which is no small one; see what it is asked to do."""
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", module := MagicMock())
    return module


# What it warns of is not ours to fix.
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_gets_the_metrics() -> None:
    pytest.importorskip("tensorboard")
    Path("r").mkdir()
    for logger in metrics.loggers(Path("r"), ["tensorboard"], 0):
        logger.log(1, {"loss": 2.0, "bits": None})
        logger.close()
    assert list(Path("r/tensorboard").iterdir())
    assert metrics.read(Path("r/metrics.jsonl")) == [{"step": 1, "loss": 2.0, "bits": None}]


def test_a_tracker_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    # Before the run's folder is made.
    with pytest.raises(MemspanError, match="pip install trackio, or leave"):
        start.train(tiny_runs.options(tracker=("trackio",)), Path("r"))
    assert not Path("r").exists()


def test_a_refusal_of_weights_and_biases_is_one_line(wandb: MagicMock) -> None:
    wandb.errors.Error = LookupError
    wandb.init.side_effect = LookupError("No API key\nconfigured")
    with pytest.raises(MemspanError, match=r"No API key configured\): .*WANDB_MODE=offline"):
        TRACKERS["wandb"](Path("r"))
    Path("r").mkdir()
    Path("r/wandb").symlink_to("elsewhere")
    with pytest.raises(MemspanError, match="wandb is a link out of the run's folder"):
        TRACKERS["wandb"](Path("r"))


def test_a_tracker_that_begins_anew_is_named(
    wandb: MagicMock, caplog: pytest.LogCaptureFixture
) -> None:
    start.train(tiny_runs.options(tracker=("wandb",)), Path("r"))
    assert not caplog.messages
    start.resume(Path("r"), config=tiny_runs.options(tracker=("wandb",), steps=7))
    (line,) = caplog.messages
    assert line.startswith("wandb: a new record begins at step 6")


def test_several_trackers_at_once(wandb: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets what metrics.jsonl gets, without what is unknown; the options name them."""
    monkeypatch.setitem(sys.modules, "trackio", trackio := MagicMock())
    Path("p.toml").write_text(to_toml(tiny_runs.OPTIONS))
    some_unknown = ["--data.tokenizer", "words", "--data.vocab-size", "5"]
    trackers = ["--train.tracker", "trackio", "wandb"]
    cli.main(["train", "--preset", "p.toml", *some_unknown, *trackers, "--out", "r"])
    records = metrics.read(Path("r/metrics.jsonl"))
    assert len(records) == 3
    known = [{k: v for k, v in record.items() if v is not None} for record in records]
    assert len(known[0]) < len(records[0])
    run = call.init()
    begun = call.init(project="memspan", name="r")
    logged = [run.log(record) for record in known]
    assert trackio.mock_calls == [begun, *logged, run.finish()]
    begun = call.init(project="memspan", name="r", dir="r")
    logged = [run.log(record, step=record.pop("step")) for record in known]
    assert wandb.mock_calls == [begun, *logged, run.finish()]
    assert read_config(Path("r/config.toml")).train.tracker == ("trackio", "wandb")
