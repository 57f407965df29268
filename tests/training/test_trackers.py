"""Trackers get what metrics.jsonl gets, and are named where they are missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import tiny_runs
from memspan import cli
from memspan.errors import MemspanError
from memspan.runs.options import read_config, to_toml
from memspan.training import metrics, start
from memspan.training.metrics import TRACKERS, Logger, Record

pytestmark = pytest.mark.usefixtures("tiny_text")


@pytest.mark.processes
def test_tensorboard_gets_the_metrics() -> None:
    pytest.importorskip("tensorboard")
    # A process of its own: what tensorboard warns of is not ours to fix.
    program = (
        "from pathlib import Path; from memspan.training.metrics import loggers\n"
        "for logger in loggers(Path('r'), ['tensorboard'], 0):\n"
        "    logger.log(1, {'loss': 2.0, 'bits': None}); logger.close()"
    )
    Path("r").mkdir()
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert list(Path("r/tensorboard").iterdir())
    assert metrics.read(Path("r/metrics.jsonl")) == [{"step": 1, "loss": 2.0, "bits": None}]


def test_a_tracker_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    # Before the run's folder is made.
    with pytest.raises(MemspanError, match="pip install trackio, or leave"):
        start.train(tiny_runs.options(tracker=("trackio",)), Path("r"))
    assert not Path("r").exists()


def test_weights_and_biases_gets_numbers_in_the_runs_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stand-in for the package, which is no small one; see what it is asked to do."""
    calls: list[object] = []
    run = SimpleNamespace(
        log=lambda record, step: calls.append((step, record)),
        finish=lambda: calls.append("finish"),
    )

    class Refusal(Exception):
        pass

    def init(**options: object) -> SimpleNamespace:
        calls.append(options)
        if "WANDB_API_KEY" not in os.environ:
            raise Refusal("No API key\nconfigured")
        return run

    module = SimpleNamespace(init=init, errors=SimpleNamespace(Error=Refusal))
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setenv("WANDB_API_KEY", "x")
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    tracker = TRACKERS["wandb"](tmp_path)
    tracker.log(3, {"loss": 2.0, "bits": None})
    tracker.close()
    options = {"project": "memspan", "name": tmp_path.name, "dir": str(tmp_path)}
    assert calls == [options, (3, {"loss": 2.0}), "finish"]
    (tmp_path / "wandb").symlink_to(tmp_path)
    with pytest.raises(MemspanError, match="wandb is a link out of the run's folder"):
        TRACKERS["wandb"](tmp_path)
    (tmp_path / "wandb").unlink()
    monkeypatch.delenv("WANDB_API_KEY")
    with pytest.raises(MemspanError, match=r"No API key configured\): .*WANDB_MODE=offline"):
        TRACKERS["wandb"](tmp_path)


def test_several_trackers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets what metrics.jsonl gets; the options name them, and files of older versions one."""
    logged: dict[str, list[tuple[int, Record]]] = {"tensorboard": [], "trackio": []}

    def tracker(name: str) -> Logger:
        taken = logged[name]
        return Logger(lambda *record: taken.append(record), lambda: taken.append((-1, {})))

    made = {name: lambda folder, name=name: tracker(name) for name in logged}
    monkeypatch.setattr("memspan.training.metrics.TRACKERS", made)
    for name in logged:
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    Path("p.toml").write_text(to_toml(tiny_runs.OPTIONS))
    trackers = ["--train.tracker", "tensorboard", "trackio"]
    cli.main(["train", "--preset", "p.toml", *trackers, "--out", "r"])
    records = metrics.read(Path("r/metrics.jsonl"))
    assert len(records) == 3
    for name in logged:
        *written, closed = logged[name]
        assert [{"step": step, **record} for step, record in written] == records
        assert closed == (-1, {})
    file = Path("r/config.toml")
    assert read_config(file).train.tracker == ("tensorboard", "trackio")
    file.write_text(file.read_text().replace('["tensorboard", "trackio"]', '"trackio"'))
    assert read_config(file).train.tracker == ("trackio",)
