"""Training ends when validations no longer improve, and counts them across interruptions."""

from __future__ import annotations

import dataclasses
import io
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import memspan
from command_line import refused
from memspan import cli
from memspan.data.prepared import prepare
from memspan.errors import MemspanError, NonFiniteError
from memspan.files.tensors import load_tensors
from memspan.runs import checkpoints
from memspan.runs.checkpoint_files import State
from memspan.runs.options import RunConfig
from memspan.training import metrics, start, updates
from memspan.training.state import TrainingState
from memspan.training.validation import Validation
from tiny_runs import OPTIONS, TEXT

NAN = float("nan")


@pytest.fixture(autouse=True)
def _text(own_folders: Path) -> None:
    Path("text.txt").write_text(TEXT)


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has the validation after step n find the n-th of some losses, and the last from then on."""
    original = Validation.score

    def found(*nats: float) -> None:
        def score(self: Validation, batch_size: int, *, emptied: bool = False) -> Any:
            scores = original(self, batch_size, emptied=emptied)
            loss = nats[min(self.state.step, len(nats)) - 1]
            if loss != loss:
                raise NonFiniteError("a loss is NaN")
            return dataclasses.replace(scores, nats=loss * scores.tokens)

        monkeypatch.setattr(Validation, "score", score)

    return found


def options(patience: int, threshold: float = 0.0, **loop: object) -> RunConfig[Any]:
    stopping: Any = {
        "steps": 12,
        "evaluate_every": 1,
        "save_every": 0,
        "early_stopping_patience": patience,
        "early_stopping_threshold": threshold,
    }
    return dataclasses.replace(OPTIONS, train=dataclasses.replace(OPTIONS.train, **stopping | loop))


def state_of(folder: str) -> State:
    return checkpoints.latest(Path(folder)).state


@pytest.mark.parametrize(
    ("patience", "threshold", "nats", "last", "best"),
    [
        (2, 0.0, [3, 2, 2, 2.5], 4, 2),
        (3, 0.0, [3, 4, 4, 2.9, 4, 4, 4], 7, 4),
        (1, 0.0, [3, 3], 2, 1),
        # Better each time, but not by enough.
        (2, 0.5, [3, 2.4, 2.1, 1.9], 4, 4),
        (2, 0.0, [3, NAN, NAN], 3, 1),
        (2, 0.0, [3, 2.9, 2.8, 2.7, 2.6, 2.5, 2.4, 2.3, 2.2, 2.1, 2, 1], 12, 12),
    ],
)
def test_it_stops_when_patience_is_used_up(
    losses: Callable[..., None],
    patience: int,
    threshold: float,
    nats: list[float],
    last: int,
    best: int,
) -> None:
    losses(*nats)
    console = Console(record=True, width=200, file=io.StringIO())
    # The score at the end is not finite where the last validation was not.
    with pytest.raises(NonFiniteError) if NAN in nats else pytest.MonkeyPatch.context():
        start.train(options(patience, threshold), Path("r"), console=console)
    state = state_of("r")
    assert (state["step"], state["best_step"]) == (last, best)
    said = console.export_text()
    assert (f"stopped early at step {last}: the last " in said) is (last < 12)
    assert memspan.load("r").step == best
    if last < 12:
        with pytest.raises(MemspanError, match=f"has stopped early at step {last}"):
            start.resume("r")


def interrupted_at(step: int, work: Callable[[], object]) -> None:
    """Ctrl-C in the update before ``step``."""
    original = updates.Updater.update

    def update(self: updates.Updater) -> object:
        if self.state.step == step - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates.Updater, "update", update)
        work()


def content(folder: str) -> dict[str, object]:
    newest = checkpoints.latest(Path(folder)).folder
    files = {p.name: load_tensors(p)[0] for p in newest.glob("*.safetensors")}
    tensors = {f"{n}/{k}": x.tolist() for n, found in files.items() for k, x in found.items()}
    state = {name: value for name, value in state_of(folder).items() if name != "metrics"}
    return tensors | state


@pytest.mark.parametrize("cut", [3, 4, 5])
def test_the_count_is_resumed(losses: Callable[..., None], cut: int) -> None:
    losses(3, 2, 2.5, 2.5, 2.5, 2.5)
    start.train(options(4), Path("whole"))
    assert state_of("whole")["step"] == 6
    interrupted_at(cut, lambda: start.train(options(4), Path("cut")))
    assert (state_of("cut")["step"], state_of("cut")["unimproved"]) == (cut, cut - 2)
    start.resume("cut")
    assert content("cut") == content("whole")
    records = [
        [r.get("validation_nats_per_token") for r in metrics.read(Path(f, "metrics.jsonl"))]
        for f in ("cut", "whole")
    ]
    assert records[0] == records[1]


def test_more_patience_goes_on(
    losses: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    losses(3, 4)
    start.train(options(2, 0.01), Path("r"))
    line = refused(capsys, "train", "--resume", "r", "--train.steps", "20")
    assert "the last 2 validations have not lowered the best loss by more than 0.01 nats" in line
    assert line.endswith("train --resume r --train.early-stopping-patience 4")
    cli.main(["train", "--resume", "r", "--train.early-stopping-patience", "4"])
    assert "stopped early at step 5: the last 4 validations" in capsys.readouterr().out
    # One option turns it off.
    cli.main(["train", "--resume", "r", "--train.early-stopping-patience=None"])
    assert state_of("r")["step"] == 12


def test_older_checkpoints_have_no_count() -> None:
    start.train(options(20, steps=2), Path("r"))
    saved = checkpoints.latest(Path("r")).load()
    old: Any = {name: value for name, value in saved.state.items() if name != "unimproved"}
    state = fresh_state(options(20, steps=4))
    state.unimproved = 7
    state.restore(dataclasses.replace(saved, state=old), Path("r"))
    assert state.unimproved == 0
    wrong: Any = saved.state | {"unimproved": "many"}
    with pytest.raises(MemspanError, match=r"does not fit its config\.toml"):
        state.restore(dataclasses.replace(saved, state=wrong), Path("r"))


def fresh_state(config: RunConfig[Any]) -> TrainingState:
    return TrainingState(config, prepare("text.txt", "bytes", None), torch.device("cpu"))


def test_the_first_process_decides() -> None:
    """Others may round the loss differently."""

    class Other:
        size = 1

        def of_first(self, value: float) -> float:
            return 2.0

    state = fresh_state(options(1))
    state.processes = Other()  # type: ignore[assignment]
    state.note_score(3.0)
    state.note_score(1.0)
    assert (state.best, state.unimproved, state.stops_early) == (2.0, 1, True)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--train.early-stopping-patience", "0"], "early_stopping_patience must be at least 1"),
        (["--train.early-stopping-threshold", "0.1"], "is for early_stopping_patience: set both"),
        (
            ["--train.early-stopping-patience", "1", "--train.early-stopping-threshold", "-1"],
            "early_stopping_threshold must be at least 0",
        ),
        (
            ["--train.early-stopping-patience", "1", "--train.evaluate-every", "0"],
            "counts validations, and evaluate_every 0 makes none",
        ),
    ],
)
def test_wrong_values(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refused(capsys, "train", *flags)
