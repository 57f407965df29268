"""The modes and defaults of whoever calls change no run: types, devices, autocast, gradients off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

import memspan
import tiny_runs
from memspan.lab.modes import usual_modes

Mode = Callable[[], AbstractContextManager[object]]
"""Makes a context such as a caller may be in."""


@contextmanager
def default_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES: dict[str, Mode] = {
    "default float64": default_float64,
    "default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def modes() -> list[object]:
    """All that this module is about, as torch has it now."""
    gradients = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    defaults = torch.get_default_dtype(), torch.get_default_device()
    return [*gradients, *defaults, torch.is_autocast_enabled("cpu")]


def trained(folder: Path) -> dict[str, Tensor]:
    """The weights of three steps and three resumed ones of a run in ``folder``."""
    model = tiny_runs.model_of("fast-weights", n_layers=1, d_model=8, n_heads=2, d_ff=8)
    memspan.train(tiny_runs.options(model, steps=3), folder)
    memspan.resume(folder, config=tiny_runs.options(model, steps=6))
    return memspan.load(folder).model.state_dict()


@pytest.mark.parametrize("name", MODES)
def test_a_run_is_trained_and_read_as_without(name: str, tmp_path: Path, tiny_text: None) -> None:
    """Under autocast gradients were rounded to bfloat16, and a default type was that of the weights."""
    expected = trained(tmp_path / "plain")
    scores = memspan.evaluate(tmp_path / "plain")
    greedy = memspan.Sampling(temperature=0)
    written = memspan.generate(tmp_path / "plain", "mem", tokens=5, sampling=greedy)
    with MODES[name]():
        before = modes()
        weights = trained(tmp_path / "within")
        assert memspan.evaluate(tmp_path / "within").nats == scores.nats
        again = memspan.generate(tmp_path / "within", "mem", tokens=5, sampling=greedy)
        assert modes() == before
    assert again.texts == written.texts
    for key, tensor in expected.items():
        assert weights[key].dtype == tensor.dtype
        assert torch.equal(weights[key], tensor), key
        assert not weights[key].is_inference()


@usual_modes()
def usual_then_error() -> None:
    assert modes() == [True, False, torch.float32, torch.device("cpu"), False]
    raise KeyError


def test_loading_leaves_the_callers_random_numbers() -> None:
    before = torch.get_rng_state()
    memspan.load("shakespeare")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", MODES)
def test_modes_return_after_an_error(name: str) -> None:
    with MODES[name]():
        before = modes()
        with pytest.raises(KeyError):
            usual_then_error()
        assert modes() == before
