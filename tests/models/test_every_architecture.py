"""The command line from the first step to a saved memory, the same for every architecture, and for one
from outside the package: its flags, help and errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import memspan
from command_line import SMALL, refused
from memspan.lab import cli
from memspan.lab.training import metrics
from memspan.models.registry import MODELS

TEXT = "Reading on, it remembers what it read. " * 200
# One worker has all tests of a folder.
GROUPS = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in MODELS]


@pytest.fixture(scope="module", params=GROUPS)
def architecture(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """In a folder in which one was trained: what tests write has other names."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMSPAN_CACHE", str(folder / "cache"))
        patch.setattr(metrics, "plot", lambda *_: [])
        patch.chdir(folder)
        Path("text.txt").write_text(TEXT)
        cli.main(["train", *flags(request.param), "--out", "run"])
        yield request.param


def flags(architecture: str) -> list[str]:
    """Options of the small model that it has."""
    known = {f"--model.{f.name.replace('_', '-')}" for f in fields(MODELS[architecture])}
    pairs = zip(SMALL[::2], SMALL[1::2], strict=True)
    own = [pair for pair in pairs if pair[0] in known or not pair[0].startswith("--model")]
    start = ["--model", architecture, "--data.corpus", "text.txt", "--model.dropout", "0.1"]
    return [*start, *(word for pair in own for word in pair)]


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    cli.main([str(a) for a in arguments])
    return capsys.readouterr().out


def test_trains_scores_and_writes(architecture: str, capsys: pytest.CaptureFixture[str]) -> None:
    scores = json.loads(said(capsys, "evaluate", "run", "--json"))
    assert scores["streams"] == 1
    assert scores["tokens"] == scores["n_bytes"] > 0
    assert type(memspan.load("run").model.backbone.config) is MODELS[architecture]
    write = ("generate", "run", "--prompt", "Reading", "--tokens", 12, "--seed", 1)
    text = said(capsys, *write)
    assert text.startswith("Reading")
    assert said(capsys, *write) == text


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
    assert "another model" in refused(capsys, "generate", "other", "--memory", "half.memory")


def test_resuming_ends_where_a_whole_run_ends(architecture: str) -> None:
    """A run whose last checkpoint is lost goes on from the one before, to the same bytes."""
    shutil.copytree("run", "cut")
    newest = sorted(Path("cut/checkpoints").iterdir())[-1]
    shutil.rmtree(newest)
    cli.main(["train", "--resume", "cut"])
    whole = Path("run/checkpoints", newest.name, "training.safetensors")
    assert (newest / whole.name).read_bytes() == whole.read_bytes()


# ----- From outside


EXAMPLE = Path(__file__).parents[2] / "examples" / "own_architecture.py"
OWN = """--model gated-recurrence --model.half-life 8 --model.d-model 8 --data.corpus text.txt
--train.steps 4 --train.batch-size 2 --train.segment-length 8 --train.evaluate-every 2
--train.evaluate-tokens 32 --train.sample-tokens 4 --train.device cpu --out mine"""
outside = pytest.mark.usefixtures("own_architectures")


@outside
def test_own_architecture_trains_and_generates(
    own_folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(EXAMPLE, "own_architecture.py")
    Path("text.txt").write_text("what was read is kept. " * 100)
    known = ("--import", "own_architecture")
    assert "tokens/s" in said(capsys, "train", "--dry-run", *known, *OWN.split())
    cli.main(["train", *known, *OWN.split()])
    assert "bits per" in said(capsys, "evaluate", "mine", *known)
    cli.main(["generate", "mine", *known, "--tokens", "3"])
    del MODELS["gated-recurrence"]
    assert "--import MODULE" in refused(capsys, "evaluate", "mine")


@outside
def test_an_entry_point_of_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(EXAMPLE, tmp_path / "installed_package.py")
    distribution = tmp_path / "installed_package-1.0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Name: installed-package\nVersion: 1.0\n")
    entry = "[memspan.architectures]\ngated-recurrence = installed_package\n"
    (distribution / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["train", "--model", "gated-recurrence", "--help"])
    assert MODELS["gated-recurrence"].__module__ == "installed_package"
    assert "--model.half-life" in capsys.readouterr().out
