"""Decisions of validations: the best weights, the checkpoints that stay, and an early end."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import memspan
import tiny_runs
from command_line import refused
from memspan.errors import MemspanError, NonFiniteError
from memspan.lab import cli
from memspan.lab.runs import checkpoints
from memspan.lab.runs.options import RunConfig
from memspan.lab.training import start
from memspan.lab.training.validation import Validation
from tiny_runs import step_of

pytestmark = pytest.mark.usefixtures("tiny_text")
NAN = float("nan")


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has the validation after step n find the n-th of some losses, and the last from then on."""
    original = Validation.score

    def found(*nats: float) -> None:
        def score(self: Validation, batch_size: int, *, emptied: bool = False) -> Any:
            scores = original(self, batch_size, emptied=emptied)
            loss = nats[min(self.state.step, len(nats)) - 1]
            # The score that is shown at the end, of one stream, is let pass.
            if loss != loss and batch_size > 1:
                raise NonFiniteError("a loss is NaN")
            return dataclasses.replace(scores, nats=loss * scores.tokens)

        monkeypatch.setattr(Validation, "score", score)

    return found


def options(patience: int, threshold: float = 0.0) -> RunConfig[Any]:
    stopping = {"early_stopping_patience": patience, "early_stopping_threshold": threshold}
    return tiny_runs.options(steps=12, evaluate_every=1, save_every=0, **stopping)


@pytest.mark.parametrize(("keep", "left"), [(2, [4, 16, 20]), (0, [4, 8, 12, 16, 20])])
def test_the_newest_checkpoints_and_the_best_stay(
    losses: Callable[..., None], keep: int, left: list[int]
) -> None:
    losses(*range(20))
    start.train(tiny_runs.options(evaluate_every=4, save_every=4, steps=20, keep=keep), Path("r"))
    assert checkpoints.steps_of(Path("r")) == left
    assert Path("r/checkpoints/best").read_text() == "step-00000004\n"
    assert memspan.load("r").step == 4


@pytest.mark.parametrize(
    ("patience", "threshold", "nats", "last", "best"),
    [
        (3, 0.0, [3, 4, 4, 2.9, 4, 4, 4], 7, 4),
        # Better each time, but not by enough.
        (2, 0.5, [3, 2.4, 2.1, 1.9], 4, 4),
        (2, 0.0, [3, NAN, NAN], 3, 1),
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
    start.train(options(patience, threshold), Path("r"), console=console)
    assert (step_of("r"), memspan.load("r").step) == (last, best)
    said = console.export_text()
    assert f"stopped early at step {last}: the last " in said
    # It is said, and the run goes on.
    assert ("validation: a loss is NaN" in said) == (NAN in nats)
    assert all(nats == nats for _, nats in tiny_runs.validations("r"))
    with pytest.raises(MemspanError, match=f"has stopped early at step {last}"):
        start.resume("r")


def test_more_patience_goes_on(
    losses: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    losses(3, 4)
    start.train(options(2, 0.01), Path("r"))
    line = refused(capsys, "train", "--resume", "r", "--train.steps", "20")
    assert "the last 2 validations did not lower the best loss by more than 0.01 nats" in line
    assert line.endswith("train --resume r --train.early-stopping-patience 4")
    cli.main(["train", "--resume", "r", "--train.early-stopping-patience", "4"])
    said = capsys.readouterr().out
    assert "stopped early at step 5: the last 4 validations" in said
    assert "it is that of step 1\n" in said
    # One option turns it off.
    cli.main(["train", "--resume", "r", "--train.early-stopping-patience=None"])
    assert step_of("r") == 12


def test_the_first_process_decides() -> None:
    """Others may round the loss differently."""
    state = tiny_runs.state_of(options(1))
    state.processes = SimpleNamespace(of_first=lambda value: 2.0)  # type: ignore[assignment]
    state.note_score(3.0)
    state.note_score(1.0)
    assert (state.best, state.unimproved, state.stops_early) == (2.0, 1, True)
