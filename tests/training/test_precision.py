"""Precision of products: options, what auto is, what stays as it was, and what is computed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console
from torch import Tensor

import tiny_runs
from architectures import CASES
from memspan import precision
from memspan.errors import MemspanError
from memspan.lab import cli
from memspan.lab.runs.options import RunConfig, load_config
from memspan.lab.training import start, updates, validation
from memspan.models.options import EmbeddingConfig
from memspan.models.registry import MODELS
from memspan.precision import AUTOMATIC, Precision, resolve

CPU = torch.device("cpu")
SMALL = {"n_layers": 2, "d_model": 8, "n_heads": 2, "d_ff": 12, "memory_length": 4}
LOOP = {"steps": 3, "evaluate_every": 0, "save_every": 1, "sample_tokens": 8}


def setting() -> list[Any]:
    """All that torch knows of the precision of float32's products, and autocast."""
    libraries = [library.fp32_precision for library in precision._libraries()]
    return [precision.float32_matmul_precision(), torch.is_autocast_enabled("cpu"), *libraries]


@pytest.fixture(autouse=True)
def _settings_stay(tiny_text: None) -> Iterator[None]:
    before = setting()
    yield
    assert setting() == before


# ----- Settings of torch


@pytest.mark.parametrize("was", ["as it starts", "set as a whole", "set for a library"])
def test_settings_of_torch_are_restored(was: str) -> None:
    """Also after an error, and where its newer settings, library by library, were used."""
    libraries = precision._libraries()
    untouched = [library.fp32_precision for library in libraries]
    if was == "set as a whole":
        torch.set_float32_matmul_precision("high")
    elif was == "set for a library" and libraries:
        libraries[-1].fp32_precision = "bf16"
    before = setting()
    for wanted in ("medium", "highest"):
        with contextlib.suppress(KeyError), Precision(matmul=wanted).applied(CPU):
            assert torch.get_float32_matmul_precision() == wanted
            raise KeyError
        assert setting() == before
    with Precision("bfloat16").applied(CPU):
        assert torch.is_autocast_enabled("cpu")
        with Precision().applied(CPU):
            assert not torch.is_autocast_enabled("cpu")
    assert setting() == before
    torch.set_float32_matmul_precision("highest")
    for library, value in zip(libraries, untouched, strict=True):
        library.fp32_precision = value


# ----- What the options mean


def test_the_requested_precision_wins() -> None:
    """Nothing asked for is float32 everywhere, until there are curves."""
    assert Precision() == AUTOMATIC
    row = Precision("float32", "medium")
    assert resolve("auto", "auto", row, CPU) == row
    assert resolve("float32", "high", row, CPU) == Precision("float32", "high")
    # What is said of float32's products is nothing to bfloat16.
    assert resolve("bfloat16", "auto", row, CPU) == Precision("bfloat16")
    with pytest.raises(MemspanError, match="use precision float32, or matmul_precision highest"):
        resolve("auto", "high", Precision("bfloat16"), CPU)
    with pytest.raises(MemspanError, match="meta has no bfloat16: use precision float32"):
        resolve("bfloat16", "auto", Precision(), torch.device("meta"))


def test_slow_bfloat16_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: False)
    (line,) = Precision("bfloat16").notices(CPU, None)
    assert "40 to 500 times" in line
    assert not Precision().notices(CPU, "a loop is computed")
    assert not Precision("bfloat16").notices(torch.device("cuda"), None)
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: True)
    # With learned spans all of the reference is bfloat16 in training.
    for name, n_lines in {"compressive": 0, "feedback": 1, "feedback-last-post": 0}.items():
        part = CASES[name].model().train().float32_part()
        assert len(Precision("bfloat16").notices(CPU, part)) == n_lines


# ----- What is computed


def options(architecture: str = "transformer-xl", **loop: Any) -> RunConfig[Any]:
    return tiny_runs.options(tiny_runs.model_of(architecture, **SMALL), **LOOP | loop)


@pytest.mark.parametrize("name", MODELS)
def test_training_in_bfloat16(name: str) -> None:
    """Three updates: losses near float32's; weights, memory and validation in float32."""
    losses: dict[str, Tensor] = {}
    for products in ("float32", "bfloat16"):
        config = options(name, precision=products)
        narrow = dataclasses.replace(config, embedding=EmbeddingConfig(d_embed=6))
        state = tiny_runs.state_of(narrow)
        updater = updates.Updater(state)
        losses[products] = torch.tensor([updater.update() for _ in range(3)])
        read = [*state.memory.tensors().values(), *state.model.parameters()]
        assert {t.dtype for t in read if t.is_floating_point()} == {torch.float32}
        assert state.environment()["precision"] == products
        score = validation.Validation(state).score(2).nats
        state.precision = Precision()
        assert validation.Validation(state).score(2).nats == score
    assert not torch.equal(*losses.values())
    torch.testing.assert_close(*losses.values(), rtol=0, atol=0.03)


def test_all_of_an_update_is_computed_as_asked() -> None:
    """Forward and backward; the setting outside is another, and stays."""
    state = tiny_runs.state_of(options(matmul_precision="medium"))
    seen = []

    def look(*_: Any) -> None:
        seen.append(torch.get_float32_matmul_precision())

    state.model.embedding.register_forward_hook(look)
    for parameter in state.model.parameters():
        parameter.register_hook(look)
    updates.Updater(state).update()
    assert len(seen) > 2
    trained = len(seen)
    validation.Validation(state).score(2)
    validation.Validation(state).sample(1)
    assert len(seen) > trained + 1
    assert set(seen) == {"medium"}


# ----- Runs


def test_a_run_goes_on_in_its_own_precision(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start.train(options(), Path("r"), console=Console(width=1000))
    assert "on cpu in float32 (matmul precision highest) with 1 thread\n" in capsys.readouterr().out
    sealed = load_config(Path("r")).train
    assert (sealed.precision, sealed.matmul_precision) == ("float32", "highest")
    # On a machine where new runs would take another.
    monkeypatch.setattr("memspan.lab.training.state.AUTOMATIC", Precision("bfloat16"))
    for flags in (["--train.steps=4"], ["--train.steps=5", "--train.precision=auto"]):
        cli.main(["train", "--resume", "r", *flags])
        assert "on cpu in float32 (" in capsys.readouterr().out
    assert load_config(Path("r")).train.precision == "float32"


def test_a_precision_that_is_not_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start.train(options(precision="bfloat16"), Path("r"))
    none = Mock(side_effect=RuntimeError("bfloat16 is not supported"))
    files = {path: path.read_bytes() for path in Path("r").rglob("*") if path.is_file()}
    refusal = pytest.raises(MemspanError, match="cpu has no bfloat16: use precision float32")
    with monkeypatch.context() as patch, refusal:
        patch.setattr(Precision, "autocast", none)
        start.resume(Path("r"), config=options(steps=4))
    assert {path: path.read_bytes() for path in files} == files
    start.resume(Path("r"), console=Console(), config=options(precision="float32", steps=4))
    assert 'precision "bfloat16", now "float32"' in " ".join(capsys.readouterr().out.split())


def test_reading_in_another_precision(capsys: pytest.CaptureFixture[str]) -> None:
    """Scores are of float32 whatever the run was trained in, unless asked otherwise."""
    start.train(options(precision="bfloat16"), Path("r"))
    capsys.readouterr()

    def scored(*flags: str) -> tuple[dict[str, Any], str]:
        cli.main(["evaluate", "r", "--json", "--tokens", "16", *flags])
        out, err = capsys.readouterr()
        return json.loads(out), err

    exact, quiet = scored()
    assert (exact["precision"], exact["matmul_precision"], quiet) == ("float32", "highest", "")
    for flags in (["--precision", "bfloat16"], ["--matmul-precision", "medium"]):
        values, _ = scored(*flags)
        assert flags[1] in (values["precision"], values["matmul_precision"])
        assert values["nats_per_token"] == pytest.approx(exact["nats_per_token"], abs=0.01)
        cli.main(["generate", "r", "--tokens", "3", *flags])
        capsys.readouterr()
    cli.main(["evaluate", "r", "--tokens", "16", "--precision", "bfloat16"])
    assert ", bfloat16\n" in capsys.readouterr().out
