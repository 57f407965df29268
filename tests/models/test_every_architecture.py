"""The command line from the first step to a saved memory, the same for every architecture."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import memspan
from memspan import cli
from memspan.data.prepared import prepare
from memspan.models.registry import MODELS
from memspan.training import metrics

TEXT = "Reading on, it remembers what it read. " * 200
LOOP = {
    "--model.n-layers": 2,
    "--model.d-model": 16,
    "--model.n-heads": 2,
    "--model.d-ff": 32,
    "--model.dropout": 0.1,
    "--train.steps": 8,
    "--train.batch-size": 2,
    "--train.segment-length": 8,
    "--train.evaluate-every": 4,
    "--train.evaluate-tokens": 64,
    "--train.save-every": 4,
    "--train.sample-tokens": 10,
    "--train.device": "cpu",
}


# One worker has all tests of a folder.
GROUPS = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in MODELS]


@pytest.fixture(scope="module", params=GROUPS)
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """An architecture, and the folder in which one was trained: what tests write has other names."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMSPAN_CACHE", str(folder / "cache"))
        patch.setattr(metrics, "plot", lambda *_: [])
        patch.chdir(folder)
        Path("text.txt").write_text(TEXT)
        cli.main(["train", *flags(request.param), "--out", "run"])
    return str(request.param), folder


@pytest.fixture
def architecture(trained: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> str:
    name, folder = trained
    monkeypatch.setenv("MEMSPAN_CACHE", str(folder / "cache"))
    monkeypatch.setattr(metrics, "plot", lambda *_: [])
    monkeypatch.chdir(folder)
    return name


def flags(architecture: str) -> list[str]:
    known = {f"--model.{f.name.replace('_', '-')}" for f in fields(MODELS[architecture])}
    loop = {k: v for k, v in LOOP.items() if k in known or not k.startswith("--model")}
    pairs = {"--model": architecture, "--data.corpus": "text.txt"} | loop
    return [str(word) for pair in pairs.items() for word in pair]


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    cli.main([str(a) for a in arguments])
    return capsys.readouterr().out


def test_trains_scores_and_writes(architecture: str, capsys: pytest.CaptureFixture[str]) -> None:
    scores = json.loads(said(capsys, "evaluate", "run", "--json"))
    assert scores["streams"] == 1
    assert scores["tokens"] == scores["n_bytes"] > 0
    model = memspan.load("run").model
    assert type(model.backbone.config) is MODELS[architecture]
    # The same score by the model itself, every token once, the memory carried by hand.
    split = prepare("text.txt", "bytes").splits["validation"].tokens
    tokens = torch.from_numpy(split.astype("int64"))[None]
    inputs = torch.cat([torch.zeros_like(tokens[:, :1]), tokens[:, :-1]], 1)
    memory, nats = None, 0.0
    with torch.no_grad():
        for pair in torch.stack([inputs, tokens]).split(scores["segment_length"], 2):
            output = model(pair[0], memory, targets=pair[1])
            memory, nats = output.memory, nats + output.losses.sum().item()
    assert scores["nats"] == pytest.approx(nats, rel=1e-5)

    text = said(capsys, "generate", "run", "--prompt", "Reading", "--tokens", 12, "--seed", 1)
    assert text.startswith("Reading")
    again = said(capsys, "generate", "run", "--prompt", "Reading", "--tokens", 12, "--seed", 1)
    assert text == again


def test_a_saved_memory_reads_on(architecture: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Reading in two halves by way of a file writes what reading at once writes."""
    Path("book.txt").write_text(TEXT[:96])
    common = ("--greedy", "--tokens", 10)
    whole = said(capsys, "generate", "run", "--prompt-file", "book.txt", *common)
    # The first half ends where a segment ends: cuts matter to some architectures.
    Path("half.txt").write_text(TEXT[:64])
    Path("rest.txt").write_text(TEXT[64:96])
    first = ("--prompt-file", "half.txt", "--tokens", 0, "--save-memory", "half.memory")
    said(capsys, "generate", "run", *first)
    rest = ("--memory", "half.memory", "--prompt-file", "rest.txt")
    assert said(capsys, "generate", "run", *rest, *common) == whole

    # Another run's memory is refused, this run's is not.
    other = ("--train.seed", "2", "--train.steps", "1")
    cli.main(["train", *flags(architecture), *other, "--out", "other"])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        cli.main(["generate", "other", "--memory", "half.memory"])
    assert stop.value.code == 2
    assert "another model" in capsys.readouterr().err


def test_resuming_ends_where_a_whole_run_ends(architecture: str) -> None:
    """A run whose last checkpoint is lost goes on from the one before, to the same bytes."""
    shutil.copytree("run", "cut")
    newest = sorted(Path("cut/checkpoints").iterdir())[-1]
    shutil.rmtree(newest)
    cli.main(["train", "--resume", "cut"])
    name = "checkpoints/" + newest.name + "/training.safetensors"
    assert (Path("cut") / name).read_bytes() == (Path("run") / name).read_bytes()
