"""``memspan evaluate``: what it prints, other spans and memories, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import memspan
from command_line import SMALL, TEXT, pipe, refused
from memspan import cli
from memspan.models import LanguageModel
from memspan.runs.options import load_config
from memspan.runs.texts import text_of

pytestmark = pytest.mark.usefixtures("text_file")


def test_evaluate_prints_and_counts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    cli.main(["evaluate", "run", "--json"])
    scores = json.loads(capsys.readouterr().out)
    assert scores["tokens"] == scores["n_bytes"] == len(TEXT) * 95 // 100 - len(TEXT) * 90 // 100
    assert scores["streams"] == 1
    cli.main(["evaluate", "run", "--batch-size", "3", "--memory-length", "20"])
    assert "3 streams" in capsys.readouterr().out


def test_evaluation_and_generation_with_another_span(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained with span segment, read with a fixed one and clamped distances; the run stays."""
    weights = (run / "model.safetensors").read_bytes()
    other = ["--attention-span", "fixed", "--clamp-length", "5"]

    def nats(*options: str) -> float:
        capsys.readouterr()
        cli.main(["evaluate", "run", "--tokens", "90", "--memory-length", "20", "--json", *options])
        scores = json.loads(capsys.readouterr().out)
        reading = {"attention_span": "fixed", "clamp_length": 5} if options else {}
        assert scores["reading"] == reading
        return scores["nats"]

    assert nats(*other) != nats()
    # With a fixed span a score does not depend on the segments.
    assert nats(*other, "--segment-length", "3") == pytest.approx(nats(*other), rel=1e-5)
    cli.main(["evaluate", "run", "--tokens", "90", *other])
    assert "memory 8, attention span fixed, clamp length 5" in capsys.readouterr().out
    cli.main(["generate", "run", "--tokens", "5", *other])
    assert (run / "model.safetensors").read_bytes() == weights
    for verb in ("evaluate", "generate"):
        assert "clamp_length must be at least 1" in refused(
            capsys, verb, "run", "--clamp-length", "0"
        )


def test_memory_length_beyond_a_learned_table_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    learned = ["--model.positions", "learned"]
    cli.main(["train", "--data.corpus", "text.txt", "--out", "l", *SMALL, *learned])
    line = refused(capsys, "evaluate", "l", "--memory-length", "500")
    assert "set memory_length" in line
    assert "clamp_length" in line
    cli.main(["evaluate", "l", "--memory-length", "4"])
    # A longer memory leaves less of the table to a segment.
    table = load_config(Path("l")).model.max_distance
    cli.main(["evaluate", "l", "--memory-length", str(table - 1)])
    assert "segment 1," in capsys.readouterr().out


def test_a_text_is_scored_on_top_of_a_memory(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("p").write_bytes(TEXT[100:300])
    cli.main(["generate", "run", "--prompt-file", "p", "--tokens", "0", "--save-memory", "m"])
    scored = ["evaluate", "run", "--corpus", "text.txt", "--tokens", "8", "--device", "cpu"]
    nats = []
    for more in ([], ["--memory", "m"]):
        capsys.readouterr()
        cli.main([*scored, "--json", *more])
        found = json.loads(capsys.readouterr().out)
        nats.append(found["nats"])
        assert found["tokens_before"] == (200 if more else 0)
    # By hand: one segment on top of the memory.
    loaded = memspan.load("run", "cpu")
    assert isinstance(loaded.model, LanguageModel)
    whole = text_of(loaded, "text.txt", None, "validation", False).tokens[:8]
    targets = torch.from_numpy(whole.astype(int))[None]
    inputs = torch.cat([torch.zeros_like(targets[:, :1]), targets[:, :-1]], 1)
    losses = loaded.model.reader(loaded.model.load_memory("m")).read(inputs, targets=targets)
    assert nats[1] == pytest.approx(losses.sum().item(), abs=1e-5)
    assert abs(nats[0] - nats[1]) > 1e-4
    cli.main([*scored, "--memory", "m"])
    assert "on top of m" in capsys.readouterr().out
    for flags, says in [
        (["--batch-size", "2"], "batch size of 1"),
        (["--memory-length", "4"], "drop memory_length"),
    ]:
        assert says in refused(capsys, *scored, "--memory", "m", *flags)
    assert "text.txt" in refused(capsys, *scored, "--memory", "text.txt")


def test_a_text_from_standard_input_is_scored(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a whole, unless a part of it is asked for."""
    scored = ["evaluate", "run", "--json", "--corpus"]
    capsys.readouterr()
    for split, options in {"all": [], "validation": ["--split", "validation"]}.items():
        cli.main([*scored, "text.txt", "--split", split])
        of_file = json.loads(capsys.readouterr().out)
        pipe(monkeypatch, TEXT)
        cli.main([*scored, "-", *options])
        piped = json.loads(capsys.readouterr().out)
        assert (piped["corpus"], piped["split"]) == ("standard input", split)
        assert piped["nats"] == of_file["nats"]
    assert of_file["tokens"] < len(TEXT) / 10
    pipe(monkeypatch, TEXT)
    cli.main(["evaluate", "run", "--corpus", "-"])
    assert f"standard input, all: {len(TEXT):,} tokens" in capsys.readouterr().out
    pipe(monkeypatch, b"")
    assert "standard input is empty" in refused(capsys, *scored, "-")
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is closed: give --corpus a file" in refused(capsys, *scored, "-")


@pytest.mark.parametrize("batch_size", [1, 3])
def test_losses_of_all_tokens_are_written(
    run: Path, capsys: pytest.CaptureFixture[str], batch_size: int
) -> None:
    capsys.readouterr()
    how = ["--split", "train", "--tokens", "50", "--batch-size", str(batch_size)]
    command = ["evaluate", "run", *how, "--segment-length", "1", "--per-token", "losses.jsonl"]
    cli.main([*command, "--json"])
    scores = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in Path("losses.jsonl").read_text().splitlines()]
    lines.sort(key=lambda line: line["position"])
    assert [line["position"] for line in lines] == list(range(50))
    assert bytes(line["token"] for line in lines) == Path("text.txt").read_bytes()[:50]
    assert sum(line["nats"] for line in lines) == pytest.approx(scores["nats"], rel=1e-4)
    assert "losses.jsonl exists: give --per-token another path" in refused(capsys, *command)
    impossible = ["--batch-size", "999", "--per-token", "none.jsonl"]
    assert "lower" in refused(capsys, "evaluate", "run", "--tokens", "50", *impossible)
    assert not Path("none.jsonl").exists()
    assert "No such file" in refused(capsys, *command[:-1], "no/folder.jsonl")
