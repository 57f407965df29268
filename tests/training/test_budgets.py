"""How long a run trains: so many steps, tokens, or times through its text."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import memspan
from command_line import refused
from memspan import cli
from memspan.runs import checkpoints, history
from memspan.runs.options import RunConfig, load_config
from memspan.training import start
from memspan.training.options import TrainConfig
from tiny_runs import OPTIONS, TEXT


@pytest.fixture(autouse=True)
def _text(own_folders: Path) -> None:
    Path("text.txt").write_text(TEXT)


def options(**budget: object) -> RunConfig[Any]:
    loop: Any = {"steps": None} | budget
    return dataclasses.replace(OPTIONS, train=dataclasses.replace(OPTIONS.train, **loop))


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
    """That of a preset, and that of the run to resume."""
    start.train(options(max_tokens=48), Path("r"))
    cli.main(["train", "--preset", "r/config.toml", "--train.steps", "2", "--out", "two"])
    assert load_config(Path("two")).train.max_tokens is None
    assert memspan.load("two").config.train.steps == 2
    line = refused(capsys, "train", "--resume", "r")
    assert "train.max_tokens is 48; to go on: " in line
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
