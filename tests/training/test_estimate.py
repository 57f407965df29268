"""Predictions of a dry run, and its refusals."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_runs
from command_line import refused
from memspan.errors import MemspanError
from memspan.lab import cli
from memspan.lab.commands.train import train
from memspan.lab.data.options import DataConfig
from memspan.lab.distributed import reports
from memspan.lab.runs.options import RunConfig
from memspan.lab.training import start
from memspan.lab.training.estimate import Plan, Trial, estimate
from memspan.models import LanguageModel, sizes
from memspan.models.registry import MODELS

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("own_folders")


def tiny(architecture: str, **options: Any) -> RunConfig[Any]:
    sizes = {"n_layers": 3, "d_model": 16, "n_heads": 2, "d_ff": 32, "memory_length": 8}
    model = tiny_runs.model_of(architecture, **sizes)
    usual = {"steps": 10, "batch_size": 4, "segment_length": 8}
    return tiny_runs.options(model, **usual | options)


@pytest.mark.parametrize("architecture", MODELS)
def test_counts_are_those_of_the_model(architecture: str) -> None:
    found = estimate(tiny(architecture))
    model = LanguageModel(256, tiny(architecture).model)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.needs["weights"] == 4 * found.parameters
    assert found.needs["memory"] == 2 * model.initial_memory(4).nbytes
    assert found.seconds * found.tokens_per_second == pytest.approx(10 * 4 * 8)
    assert not list(Path().iterdir())


def test_few_rows_tell_the_activations_of_many() -> None:
    loop: Any = {"accumulate": 3, "gradient_segments": 3, "segment_length": 32}
    taken = {}
    for recompute in (False, True):
        config = tiny("transformer-xl", recompute=recompute, **loop)
        model = dataclasses.replace(config.model, n_layers=6, memory_length=32, dropout=0.1)
        few, many = (
            dataclasses.replace(config, model=model, train=replace(config.train, batch_size=rows))
            for rows in (2, 4)
        )
        found, taken[recompute] = (Plan(each, 256, CPU).trial().activations for each in (few, many))
        assert 2 * found == pytest.approx(taken[recompute], rel=0.15)
    assert taken[True] < taken[False] / 5


def test_speed_is_that_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def trial(plan: Plan) -> Trial:
        tried.append(plan.rows)
        return Trial(rows=4, moments=0, activations=0, seconds=2.0)

    monkeypatch.setattr(Plan, "trial", trial)
    config = tiny("lstm", batch_size=12)
    found = estimate(config)
    assert (found.probe, found.tokens_per_second) == ("updates of 4 rows", 4 * 8 / 2)
    assert estimate(config, n_processes=3).tokens_per_second == 3 * 4 * 8 / 2
    assert tried == [12, 4]


def test_processes_share_what_training_shares() -> None:
    config = tiny("transformer-xl")
    one = estimate(config)
    ddp = estimate(config, n_processes=2)
    assert "times 2" in ddp.probe
    assert ddp.needs["weights"] == one.needs["weights"]
    assert ddp.needs["gradients"] == 2 * one.needs["gradients"]
    assert ddp.needs["memory"] * 2 == one.needs["memory"]
    sharded = tiny("transformer-xl", parallel="fsdp")
    assert estimate(sharded, n_processes=2).needs["moments"] * 2 == one.needs["moments"]
    for wrong, words in ((3, "cannot be shared evenly by 3 processes"), (1, "add --nproc")):
        with pytest.raises(MemspanError, match=words):
            estimate(sharded, n_processes=wrong)


def test_unknown_sizes_are_refused_without_download() -> None:
    def config(*data: Any, **budget: Any) -> RunConfig[Any]:
        return dataclasses.replace(tiny("lstm", **budget), data=DataConfig(*data))

    assert estimate(config("wikitext-103", "words", 1000)).plan.vocab_size == 1000
    assert estimate(config("wikitext-103", "bytes")).plan.vocab_size == 256
    for unknown in (
        config("wikitext-103", "words"),
        config("wikitext-103", "bytes", steps=None, epochs=1.0),
    ):
        with pytest.raises(MemspanError, match="is not known before"):
            estimate(unknown)
    Path("text.txt").write_text("one two three " * 300)
    assert estimate(config("text.txt", "words", steps=None, epochs=2.0)).plan.vocab_size == 5


def test_the_command_line_reports(capsys: pytest.CaptureFixture[str]) -> None:
    """With a budget of tokens."""
    small = ["--model=lstm", "--train.batch-size=2", "--train.segment-length=4"]
    cli.main(["train", "--dry-run", "--train.device=cpu", *small, "--train.max-tokens=807"])
    said = capsys.readouterr().out
    for words in ("parameters", "(weights", "tokens/s", "of checkpoints", "hours for 100 steps"):
        assert words in said
    assert not list(Path().iterdir())


@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=["dry-run", "train"])
def test_refuses_runs_that_do_not_fit(
    dry: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights would fit, and the sample; not all rows' activations."""
    Path("text.txt").write_text("some text " * 500)
    monkeypatch.setattr(sizes, "_machine_memory", lambda: 4.6e8)
    rows = ["--train.segment-length=32", "--train.batch-size=64", "--train.steps=1"]
    flags = ["--data.corpus=text.txt", "--train.device=cpu", *rows]
    said = refused(capsys, "train", *dry, *flags)
    assert "training would take" in said
    assert "lower batch_size" in said
    assert not Path("runs").exists()


def test_refuses_to_estimate_some_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for flag, says in {
        "--data.corpus=-": "drop --data.corpus -",
        "--resume=shakespeare": "--resume",
        # Of these not even a sample fits.
        "--model.n-layers=1000000000": "lower",
        "--train.segment-length=10000000000": "lower",
    }.items():
        assert says in refused(capsys, "train", "--dry-run", "--train.device=cpu", flag)
    monkeypatch.setattr(reports, "is_worker", lambda: True)
    with pytest.raises(
        MemspanError, match="torchrun has already started some: drop one of the two"
    ):
        train(["--nproc", "4096"])


def test_disk_is_that_of_the_checkpoints_that_stay() -> None:
    """As many as there are at once, and not much less than one has."""
    Path("text.txt").write_text("some text " * 500)
    loop: Any = {"steps": 12, "save_every": 2, "evaluate_every": 3, "evaluate_tokens": 64}
    for keep, n in ((0, 9), (1, 3), (2, 4), (50, 9)):
        assert tiny("lstm", keep=keep, **loop).train.checkpoints(12) == n
    config = tiny("transformer-xl", keep=0, **loop)
    found = estimate(config)
    start.train(config, Path("r"))
    files = list(Path("r/checkpoints").glob("step-*/*.safetensors"))
    # Every even step, and any validation that was better.
    assert 6 <= len(files) / 2 <= 9
    used = sum(path.stat().st_size for path in files) / (len(files) / 2)
    assert used == pytest.approx(found.disk / 9, rel=0.25)
    assert estimate(config, n_processes=2).disk == 2 * found.disk
