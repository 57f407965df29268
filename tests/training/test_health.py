"""What is not finite is found, named, and kept out of weights and memory."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memspan
import tiny_runs
from architectures import CASES, VOCABULARY
from memspan.data.tokenizers.plain import ByteTokenizer
from memspan.errors import MemspanError, NonFiniteError
from memspan.evaluation import score_tokens
from memspan.memory import Memory
from memspan.models.registry import MODELS
from memspan.runs import checkpoints
from memspan.runs.options import RunConfig
from memspan.training import start, updates
from memspan.training.state import non_finite_rows
from memspan.training.updates import MOST_SKIPS_IN_A_ROW

pytestmark = pytest.mark.usefixtures("tiny_text")


def run(architecture: str, **loop: Any) -> RunConfig[Any]:
    model = MODELS[architecture](n_layers=1, d_model=16)
    usual = {"steps": 12, "batch_size": 3, "segment_length": 8, "evaluate_tokens": 64}
    return tiny_runs.options(model, **usual | {"evaluate_every": 0, "save_every": 4} | loop)


def spoil(monkeypatch: pytest.MonkeyPatch, steps: set[int], value: float = math.nan) -> None:
    """Let one gradient be ``value`` in the given steps."""
    original = updates.Updater._accumulate_gradients

    def accumulate(self: updates.Updater, *update: Any) -> Any:
        read = original(self, *update)
        if self.state.step + 1 in steps:
            gradient = self.state.model.get_parameter("head.biases.0").grad
            assert gradient is not None
            gradient[3] = value
        return read

    monkeypatch.setattr(updates.Updater, "_accumulate_gradients", accumulate)


def records() -> list[dict[str, Any]]:
    # As strict as any other reader of JSON: no NaN, no Infinity.
    def refuse(word: str) -> None:
        raise AssertionError(word)

    lines = Path("r/metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_a_stop_names_step_place_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, {6})
    with pytest.raises(MemspanError) as stop:
        start.train(run("transformer-xl"), Path("r"))
    message = str(stop.value)
    assert checkpoints.latest(Path("r")).state["step"] == 4
    # Five segments of 8 are read; the second row starts after a third of the training split.
    assert "at step 6 (tokens 40 to 48, " in message
    assert "largest gradients: head.biases.0 nan, " in message
    assert "--train.non-finite skip; the checkpoint of step 4 is kept in r" in message
    assert "\n" not in message


def test_skipped_updates_change_nothing_and_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before: dict[int, dict[str, torch.Tensor]] = {}
    original = updates.Updater.update

    def update(self: updates.Updater) -> Any:
        before[self.state.step] = {k: v.clone() for k, v in self.state.model.state_dict().items()}
        return original(self)

    monkeypatch.setattr(updates.Updater, "update", update)
    spoil(monkeypatch, {5, 11}, math.inf)
    start.train(run("transformer-xl", non_finite="skip"), Path("r"))
    for step in range(11):
        same = all(torch.equal(before[step][k], before[step + 1][k]) for k in before[step])
        assert same == (step + 1 in {5, 11}), step
    assert checkpoints.latest(Path("r")).state["health"] == {
        "skipped_updates": 2,
        "reset_memory_rows": 0,
    }
    assert [r["skipped_updates"] for r in records() if "skipped_updates" in r] == [1, 2]
    assert all("train_nats_per_token" in r for r in records() if "skipped_updates" in r)


def test_training_gives_up_where_skipping_does_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, set(range(3, 1000)))
    options = run("transformer-xl", non_finite="skip", steps=200, save_every=0)
    left_out = f"{MOST_SKIPS_IN_A_ROW} updates in a row were skipped"
    with pytest.raises(MemspanError, match=f"at step {2 + MOST_SKIPS_IN_A_ROW} .*{left_out}"):
        start.train(options, Path("r"))


@pytest.mark.parametrize("architecture", ["compressive", "fast-weights"])
def test_a_spoilt_row_of_memory_is_emptied_and_counted(architecture: str) -> None:
    """Whatever architecture: the loss that saw it is skipped, and training goes on without it."""
    with tiny_runs.at_step(5, lambda state: tiny_runs.spoil_memory(state, 1, math.inf)):
        start.train(run(architecture, non_finite="skip", segment_length=4), Path("r"))
    saved = checkpoints.latest(Path("r")).load()
    assert saved.state["health"] == {"skipped_updates": 1, "reset_memory_rows": 1}
    assert all(t.isfinite().all() for t in saved.weights.values())
    memory = {k: v for k, v in saved.training.items() if k.startswith("memory/")}
    assert all(t.isfinite().all() for t in memory.values() if t.is_floating_point())
    seen = memory["memory/tokens_seen"].tolist()
    # The others have read what came before, too.
    assert seen[0] == seen[2] > seen[1] == 24


@pytest.mark.parametrize("name", ["compressive", "feedback", "fast-delta"])
def test_rows_that_are_not_finite_are_found(name: str) -> None:
    # Loops in C are there for float32.
    model = CASES[name].model(torch.float32)
    tokens = torch.randint(VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(1))
    memory: Memory = model(tokens).memory.detach()
    assert non_finite_rows(memory) is None
    for field, tensor in memory.tensors().items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        for value in (math.nan, math.inf, -math.inf):
            spoilt = tensor.clone()
            spoilt[2].view(-1)[-1] = value
            changed = dataclasses.replace(memory, **{field: spoilt})
            rows = non_finite_rows(changed)
            assert rows is not None
            assert rows.tolist() == [False, False, True]


@pytest.mark.parametrize("architecture", ["transformer-xl", "feedback"])
def test_scores_and_texts_that_are_not_finite_are_refused(architecture: str) -> None:
    model = memspan.models.LanguageModel(256, run(architecture).model).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e30)
    with pytest.raises(NonFiniteError, match="not finite"):
        score_tokens(model, np.arange(40, dtype=np.uint8), ByteTokenizer(), segment_length=8)
