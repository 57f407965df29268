"""What a run is, and that nothing else goes on in its place: its files, its folder, its corpus."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

import memspan
from memspan import checkpoint, train
from memspan.config import DataConfig, OptimConfig, RunConfig, TrainConfig, TransformerXLConfig
from memspan.errors import MemspanError

QUIET = Console(quiet=True)
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
    """No handler of ours catches it."""


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.metrics, "plot", lambda folder: [])
    Path("text.txt").write_text(TEXT)


def during(
    monkeypatch: pytest.MonkeyPatch, events: dict[int, Callable[[], None]], out: str = "r"
) -> None:
    """Train in ``out``; ``events`` happen after so many steps, each once."""
    original, left = train.Trainer.update, dict(events)

    def update(self: train.Trainer) -> torch.Tensor | None:
        left.pop(self.step, lambda: None)()
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "update", update)
        train.train(OPTIONS, Path(out), Console(width=500))


def cut() -> None:
    raise PowerCut


def cut_run(monkeypatch: pytest.MonkeyPatch, step: int = 5, out: str = "r") -> None:
    """A run whose process was killed after ``step`` updates."""
    with pytest.raises(PowerCut):
        during(monkeypatch, {step: cut}, out)


def weights(folder: str) -> dict[str, torch.Tensor]:
    return checkpoint.latest(Path(folder)).weights


def assert_same(a: str, b: str) -> None:
    ours, theirs = weights(a), weights(b)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert ours.keys() == theirs.keys()


def flip_in_config() -> None:
    path = Path("r/config.toml")
    path.write_text(path.read_text().replace("learning_rate = 0.002", "learning_rate = 0.003"))
    assert "0.003" in path.read_text()


@pytest.mark.parametrize("ends", [True, False])
def test_options_that_change_while_training_are_not_sealed(
    ends: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train.train(OPTIONS, Path("whole"), QUIET)
    events: dict[int, Callable[[], None]] = {3: flip_in_config}
    if ends:
        during(monkeypatch, events)
    else:
        with pytest.raises(PowerCut):
            during(monkeypatch, events | {5: cut})
    assert "r/config.toml was changed while training" in capsys.readouterr().out
    assert "0.003" in Path("r/config.toml.changed").read_text()
    if not ends:
        train.resume(Path("r"), QUIET)
    assert memspan.load("r").config == memspan.load("whole").config
    assert_same("r", "whole")


def test_options_that_change_and_were_not_seen_yet_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(PowerCut):
        during(monkeypatch, {5: lambda: (flip_in_config(), cut())})  # type: ignore[func-returns-value]
    with pytest.raises(MemspanError, match=r"config.toml in r has changed"):
        train.resume(Path("r"), QUIET)


def test_files_that_are_deleted_while_training_are_written_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train.train(OPTIONS, Path("whole"), QUIET)
    names = ("config.toml", "tokenizer.json")

    def delete() -> None:
        for name in names:
            Path("r", name).unlink()

    during(monkeypatch, {5: delete})
    said = capsys.readouterr().out
    for name in names:
        assert f"r/{name} was deleted while training: it is written again" in said
        assert Path("r", name).read_bytes() == Path("whole", name).read_bytes()
    memspan.load("r")


def test_a_folder_that_is_moved_while_training_is_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another run under its old name is left alone, to the byte."""
    train.train(OPTIONS, Path("whole"), QUIET)

    def move() -> None:
        Path("r").rename("moved")
        shutil.copytree("whole", "r")

    with pytest.raises(MemspanError, match=r"folder r was moved .*stopped at step 4 .*/moved$"):
        during(monkeypatch, {3: move})
    for path in Path("whole").rglob("*"):
        if path.is_file():
            assert Path("r", path.relative_to("whole")).read_bytes() == path.read_bytes()
    assert not list(Path().rglob("r/**/.*"))
    train.resume(Path("moved"), QUIET)
    assert_same("moved", "whole")
    steps = [r["step"] for r in train.metrics.read(Path("moved/metrics.jsonl"))]
    assert steps == [r["step"] for r in train.metrics.read(Path("whole/metrics.jsonl"))]


def test_a_folder_that_is_deleted_while_training_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def replace() -> None:
        shutil.rmtree("r")
        Path("r").mkdir()

    with pytest.raises(MemspanError, match="folder r was deleted, moved or replaced"):
        during(monkeypatch, {3: replace})
    assert not list(Path("r").iterdir())


def test_a_run_that_is_copied_or_moved_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    train.train(OPTIONS, Path("whole"), QUIET)
    cut_run(monkeypatch)
    shutil.copytree("r", "copy")
    Path("r").rename("moved")
    for folder in ("copy", "moved"):
        train.resume(Path(folder), QUIET)
        assert_same(folder, "whole")


def test_an_old_checkpoint_that_stayed_is_deleted_at_the_next_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its folder was busy or read-only for a while."""
    original, refused = shutil.rmtree, []

    def rmtree(path: Path, ignore_errors: bool = False) -> None:
        if ".old.tmp" in path.name and not refused:
            refused.append(path)
        else:
            original(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(checkpoint.shutil, "rmtree", rmtree)
    loop = dataclasses.replace(OPTIONS.train, save_every=1)
    train.train(dataclasses.replace(OPTIONS, train=loop), Path("r"), QUIET)
    assert refused
    assert not list(Path("r/checkpoints").glob(".*"))
