"""Devices that are not here: Apple's Metal (mps) has no float64, so none may be made there.

The CPU stands for it. Two functions need float64: they move to the CPU first, and nothing else may.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memspan import nn
from memspan.evaluation import sum_of
from memspan.models import LanguageModel
from memspan.models.fast_weights.config import FastWeightsConfig
from memspan.models.registry import MODELS
from memspan.training.state import non_finite_rows

ON_THE_CPU = {"sinusoids", "sum_of"}
"""Functions that compute in float64, on the CPU."""


class NoFloat64(TorchDispatchMode):
    """Refuses float64 outside those functions, and within them before something is moved."""

    moved = False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in tree_leaves(found)):
            callers = {frame.name for frame in traceback.extract_stack()}
            assert callers & ON_THE_CPU, func
            assert self.moved, func
        return found


@pytest.fixture
def _no_float64(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(nn, "NO_FLOAT64", ("cpu",))
    mode, to_cpu = NoFloat64(), Tensor.cpu

    def cpu(x: Tensor) -> Tensor:
        mode.moved = True
        return to_cpu(x)

    monkeypatch.setattr(Tensor, "cpu", cpu)
    with mode:
        yield


pytestmark = pytest.mark.usefixtures("_no_float64")


def test_the_check_notices() -> None:
    with pytest.raises(AssertionError):
        torch.zeros(2).double()


@pytest.mark.parametrize("architecture", MODELS)
def test_a_training_step(architecture: str) -> None:
    options = MODELS[architecture](n_layers=1, d_model=8)
    if isinstance(options, FastWeightsConfig):
        options = dataclasses.replace(options, positions="sinusoidal")
    model, tokens = LanguageModel(11, options), torch.zeros(2, 6, dtype=torch.int64)
    output = model(tokens, targets=tokens)
    output = model(tokens, output.memory.detach(), targets=tokens)
    output.loss.backward()
    assert non_finite_rows(output.memory) is None


def test_the_sum_of_a_score() -> None:
    assert sum_of(torch.ones(2, 6), torch.zeros(2, 6, dtype=torch.int64)) == 12


def test_a_memory_whose_sum_overflows_is_finite() -> None:
    """Health adds up in float32: that overflow says only that each element is to be looked at."""
    memory = LanguageModel(11, MODELS["transformer-xl"]()).initial_memory(2)
    memory = memory.map(lambda t: torch.full_like(t, 3e38) if t.is_floating_point() else t)
    assert non_finite_rows(memory) is None
