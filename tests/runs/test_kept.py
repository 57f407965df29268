"""The checkpoints that stay in a run's folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import memspan
from command_line import refused
from memspan.errors import MemspanError
from memspan.files.tensors import load_tensors
from memspan.lab import cli
from memspan.lab.runs import checkpoints
from memspan.lab.training import start
from tiny_runs import options


@pytest.fixture(autouse=True)
def run(tiny_text: None) -> Path:
    """A run of six steps, each with a checkpoint. The loss falls: the last validation is the best."""
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


def test_any_of_them_is_loaded_by_its_path(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = run / "checkpoints/step-00000004"
    weights = load_tensors(checkpoint / "model.safetensors")[0]
    for path in (checkpoint, "run/checkpoints/step-4", f"{checkpoint.absolute()}/"):
        found = memspan.load(path)
        assert (found.step, found.folder) == (4, Path(path))
        loaded = found.model.state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
    # The best at that time, wherever the run goes.
    Path("moved").mkdir()
    run.rename("moved/run")
    assert memspan.load("moved/run/checkpoints/best").step == memspan.load("moved/run").step == 6
    scores = memspan.evaluate("moved/run/checkpoints/step-4", "text.txt", tokens=32)
    assert scores.run == "moved/run/checkpoints/step-4"
    assert scores.nats != memspan.evaluate("moved/run", "text.txt", tokens=32).nats
    monkeypatch.chdir("moved/run/checkpoints")
    assert memspan.load("step-4").step == 4


def test_every_verb_takes_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = "run/checkpoints/step-4"
    cli.main(["evaluate", path, "--tokens", "32"])
    assert capsys.readouterr().out.startswith(f"{path}  ")
    cli.main(["generate", path, "--prompt", "memory", "--tokens", "2"])
    assert capsys.readouterr().out.startswith("memory")
    cli.main(["measure", path, "--budget", "0.1", "--longest", "4"])
    assert f"written: {run / 'checkpoints/step-00000004/measure.json'}" in capsys.readouterr().out
    cli.main(["check", path, "--laws", "repeatable"])
    assert "holds" in capsys.readouterr().out
    small = ["--preset", "run/config.toml", "--train.steps", "1", "--out", "warm"]
    cli.main(["train", "--init-from", path, *small])
    assert f"initialised from {path}: " in capsys.readouterr().out


def test_verbs_for_whole_runs_refuse_checkpoints(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "run/checkpoints/step-4"
    assert "--init-from takes the weights" in refused(capsys, "train", "--resume", path)
    assert "give the run's folder, run" in refused(capsys, "export", path)
    for wrong in ("step-7", "step-", "step-x", "bets", f"step-{'9' * 30}"):
        line = refused(capsys, "evaluate", f"run/checkpoints/{wrong}")
        assert "step-00000003, step-00000004, step-00000005" in line
    for text in ("../..", ""):
        (run / "checkpoints/best").write_text(text)
        assert "there is no checkpoint" in refused(capsys, "evaluate", "run/checkpoints/best")
    assert "checkpoints is not a run" in refused(capsys, "evaluate", "run/checkpoints")


def test_a_damaged_one_is_refused(run: Path) -> None:
    first, other = (run / f"checkpoints/step-0000000{n}" for n in (4, 5))
    shutil.copyfile(other / "model.safetensors", first / "model.safetensors")
    with pytest.raises(MemspanError, match="is another checkpoint's: restore its own"):
        memspan.load(first)
    (first / "model.safetensors").unlink()
    with pytest.raises(MemspanError, match="is missing"):
        memspan.load(first)
    (other / "state.json").unlink()
    with pytest.raises(MemspanError, match=r"state\.json is missing: restore it"):
        memspan.load(other)


def test_a_device_that_is_not_here_is_refused(run: Path) -> None:
    with pytest.raises(MemspanError, match="there is no device 'nowhere' here"):
        memspan.load(run, "nowhere")
    assert memspan.load(run, "auto").step == 6
