"""Values that are not finite are found, named, and kept out of weights and memory."""

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
from memspan.errors import MemspanError, NonFiniteError
from memspan.lab.data.tokenizers.plain import ByteTokenizer
from memspan.lab.evaluation import score_tokens
from memspan.lab.runs import checkpoints
from memspan.lab.runs.options import RunConfig
from memspan.lab.training import start, updates
from memspan.lab.training.state import non_finite_rows
from memspan.lab.training.updates import MOST_SKIPS_IN_A_ROW
from memspan.memory import Memory
from memspan.models import LanguageModel
from memspan.models.registry import MODELS

pytestmark = pytest.mark.usefixtures("tiny_text")


def run(architecture: str, **loop: Any) -> RunConfig[Any]:
    model = MODELS[architecture](n_layers=1, d_model=16)
    usual = {"steps": 12, "batch_size": 3, "segment_length": 8, "evaluate_tokens": 64}
    return tiny_runs.options(model, **usual | {"evaluate_every": 0, "save_every": 4} | loop)


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """A number to put into one gradient, by step."""
    original = updates.Updater._accumulate_gradients
    values = dict[int, float]()

    def accumulate(self: updates.Updater, *update: Any) -> Any:
        read = original(self, *update)
        if (value := values.get(self.state.step + 1)) is not None:
            gradient = self.state.model.get_parameter("head.biases.0").grad
            assert gradient is not None
            gradient[3] = value
        return read

    monkeypatch.setattr(updates.Updater, "_accumulate_gradients", accumulate)
    return values


def test_a_stop_names_step_place_and_gradients(spoilt: dict[int, float]) -> None:
    spoilt[6] = math.nan
    with pytest.raises(MemspanError) as stop:
        start.train(run("transformer-xl"), Path("r"))
    message = str(stop.value)
    assert tiny_runs.step_of("r") == 4
    # Five segments of 8 are read; the second row starts after a third of the training split.
    assert "at step 6 (tokens 40 to 48, " in message
    assert "largest gradients: head.biases.0 nan, " in message
    assert "--train.non-finite skip; the checkpoint of step 4 is kept in r" in message
    assert "\n" not in message


def test_skipped_updates_change_nothing_and_are_counted(spoilt: dict[int, float]) -> None:
    spoilt |= {5: math.inf, 11: math.inf}
    with tiny_runs.cut_at(8):
        start.train(run("transformer-xl", non_finite="skip", save_every=1, keep=0), Path("r"))
    start.resume(Path("r"))
    models = [memspan.load(f"r/checkpoints/step-{n}").model.fingerprint() for n in range(1, 13)]
    assert [n for n in range(2, 13) if models[n - 1] == models[n - 2]] == [5, 11]
    health = {"skipped_updates": 2, "reset_memory_rows": 0}
    assert checkpoints.latest(Path("r")).state["health"] == health
    # As strict as any other reader of JSON: no NaN, no Infinity.
    lines = Path("r/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [r["skipped_updates"] for r in records if "train_nats_per_token" in r] == [1, 2]


def test_training_gives_up_where_skipping_does_not_help(spoilt: dict[int, float]) -> None:
    spoilt |= dict.fromkeys([3, *range(5, 200)], math.nan)
    options = run("transformer-xl", non_finite="skip", steps=200, save_every=0)
    left_out = f"{MOST_SKIPS_IN_A_ROW} updates in a row were skipped"
    with pytest.raises(MemspanError, match=f"at step {4 + MOST_SKIPS_IN_A_ROW} .*{left_out}"):
        start.train(options, Path("r"))


@pytest.mark.parametrize("architecture", ["compressive", "fast-weights"])
def test_a_spoilt_row_of_memory_is_emptied_and_counted(architecture: str) -> None:
    """Every architecture skips the loss that saw it, and training goes on."""
    with tiny_runs.at_step(5, lambda state: tiny_runs.spoil_memory(state, 1, math.inf)):
        start.train(run(architecture, non_finite="skip", segment_length=4), Path("r"))
    saved = checkpoints.latest(Path("r")).load()
    assert saved.state["health"] == {"skipped_updates": 1, "reset_memory_rows": 1}
    tensors = [*saved.weights.values(), *saved.training.values()]
    assert all(t.isfinite().all() for t in tensors)
    seen = saved.training["memory/tokens_seen"].tolist()
    # The others have read what came before, too.
    assert seen[0] == seen[2] > seen[1] == 24


@pytest.mark.parametrize("name", ["compressive", "feedback", "fast-delta"])
def test_rows_that_are_not_finite_are_found(name: str) -> None:
    # Loops in C are there for float32.
    model = CASES[name].model(torch.float32)
    memory: Memory = model(torch.randint(VOCABULARY, (3, 7))).memory.detach()
    assert non_finite_rows(memory) is None
    for field, tensor in memory.tensors().items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        for value in (math.nan, math.inf, -math.inf):
            spoilt = tensor.clone()
            spoilt[2].view(-1)[-1] = value
            rows = non_finite_rows(dataclasses.replace(memory, **{field: spoilt}))
            assert rows is not None
            assert rows.tolist() == [False, False, True]


@pytest.mark.parametrize("architecture", ["transformer-xl", "feedback"])
def test_scores_that_are_not_finite_are_refused(architecture: str) -> None:
    model = LanguageModel(256, run(architecture).model).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e30)
    with pytest.raises(NonFiniteError, match="not finite"):
        score_tokens(model, np.arange(40, dtype=np.uint8), ByteTokenizer(), segment_length=8)
