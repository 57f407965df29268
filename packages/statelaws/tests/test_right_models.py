"""Right models of many kinds: no law accuses one of them."""

from __future__ import annotations

import pytest
import torch

from right_models import LOW, RIGHT
from statelaws import Report, check
from statelaws.protocol import Stateful

SAMPLE = (
    *("linear attention, chunks of 8", "retention in float64", "diagonal state space by FFT"),
    *("a table of 48 positions", "convolutions with batch norm", "frames to a policy"),
    *("a state with slots", "cuts at multiples of a chunk", "logits times 1e-8", "spikes"),
    "a parameter that was expanded",
)
UNDECIDED = {
    "a table of 48 positions": {"bounded", "long-run"},
    "spikes": {"gradients"},
}
"""Laws that cannot be decided: a thousand segments do not fit; a step has no slope."""


def accused(model: Stateful[object], seed: int) -> Report:
    report = check(model, seed=seed, budget=60)
    assert not report.broken, str(report)
    return report


@pytest.mark.parametrize("name", SAMPLE)
def test_a_right_model_is_not_accused(name: str) -> None:
    outcomes = {f.law: f.outcome for f in accused(RIGHT[name](), 0).findings}
    undecided = {law for law, found in outcomes.items() if found in ("refused", "inconclusive")}
    assert undecided == UNDECIDED.get(name, set())


@pytest.mark.parametrize("name", ["LSTM", "retention", "keys and values"])
def test_laws_are_decided_in_bfloat16(name: str) -> None:
    found = {finding.outcome for finding in accused(LOW[name](torch.bfloat16), 0).findings}
    assert found <= {"holds", "not-offered"}


@pytest.mark.journeys
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", RIGHT)
def test_right_models_are_not_accused(name: str, seed: int) -> None:
    accused(RIGHT[name](), seed)


@pytest.mark.journeys
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LOW)
def test_right_models_of_two_bytes_are_not_accused(
    name: str, dtype: torch.dtype, seed: int
) -> None:
    accused(LOW[name](dtype), seed)
