"""The checkpoints that stay in a run's folder."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from command_line import refused
from memspan import cli
from memspan.runs import checkpoints
from memspan.runs.options import RunConfig
from memspan.training import start
from tiny_runs import OPTIONS, TEXT


def options(**loop: Any) -> RunConfig[Any]:
    return dataclasses.replace(OPTIONS, train=dataclasses.replace(OPTIONS.train, **loop))


@pytest.fixture(autouse=True)
def run(own_folders: Path) -> Path:
    """Of six steps, each with a checkpoint. The loss falls: the last validation is the best."""
    Path("text.txt").write_text(TEXT)
    return start.train(options(save_every=1, keep=0), "run")


def test_more_or_fewer_stay_when_it_is_resumed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checkpoints.steps_of(run) == [1, 2, 3, 4, 5, 6]
    # Whatever is refused deletes nothing; nor does making the checkpoints plain.
    assert "is finished" in refused(capsys, "train", "--resume", run, "--train.keep", "1")
    cli.main(["export", str(run)])
    assert checkpoints.steps_of(run) == [1, 2, 3, 4, 5, 6]
    cli.main(["train", "--resume", str(run), "--train.steps", "7", "--train.keep", "3"])
    assert checkpoints.steps_of(run) == [5, 6, 7]
    assert "keep must be at least 0" in refused(capsys, "train", "--train.keep", "-1")


def test_the_best_is_named_again_where_its_name_is_lost(run: Path) -> None:
    best = run / "checkpoints/best"
    assert best.read_text() == "step-00000006\n"
    best.unlink()
    cli.main(["export", str(run)])
    assert best.read_text() == "step-00000006\n"
    shutil.rmtree(run / "checkpoints/step-00000006")
    best.write_text("step-00000001")
    cli.main(["export", str(run)])
    # Of the steps that are left, 3 was validated.
    assert best.read_text() == "step-00000003\n"


def test_without_validations_there_is_no_best() -> None:
    folder = start.train(options(save_every=1), "other")
    assert (folder / "checkpoints/best").exists()
    state = checkpoints.latest(folder).state
    assert state["best_step"] == 6
    checkpoints.recover(folder, state | {"best_step": None}, 2)
    assert not (folder / "checkpoints/best").exists()
