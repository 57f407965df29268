"""``memspan evaluate``: what it prints, other spans and memories, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import memspan
from command_line import SMALL, TEXT, pipe, refused
from memspan import cli
from memspan.models import LanguageModel
from memspan.runs.options import load_config
from memspan.runs.texts import text_of

pytestmark = pytest.mark.usefixtures("text_file")


def scored(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """The scores of the run ``run``."""
    capsys.readouterr()
    cli.main(["evaluate", "run", "--json", *options])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_evaluate_prints_and_counts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = scored(capsys)
    assert scores["tokens"] == scores["n_bytes"] == len(TEXT) * 95 // 100 - len(TEXT) * 90 // 100
    assert scores["streams"] == 1
    cli.main(["evaluate", "run", "--batch-size", "3", "--memory-length", "20"])
    assert "3 streams" in capsys.readouterr().out


def test_evaluation_and_generation_with_another_span(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained with span segment, read with a fixed one and clamped distances."""
    other = ["--attention-span", "fixed", "--clamp-length", "5"]
    longer = ["--tokens", "90", "--memory-length", "20"]
    found = scored(capsys, *longer, *other)
    assert found["reading"] == {"attention_span": "fixed", "clamp_length": 5}
    assert found["nats"] != scored(capsys, *longer)["nats"]
    # With a fixed span a score does not depend on the segments.
    short = scored(capsys, *longer, *other, "--segment-length", "3")
    assert short["nats"] == pytest.approx(found["nats"], rel=1e-5)
    cli.main(["evaluate", "run", "--tokens", "90", *other])
    assert "memory 8, attention span fixed, clamp length 5" in capsys.readouterr().out
    cli.main(["generate", "run", "--tokens", "5", *other])
    for verb in ("evaluate", "generate"):
        said = refused(capsys, verb, "run", "--clamp-length", "0")
        assert "clamp_length must be at least 1" in said


def test_memory_length_beyond_a_learned_table_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    learned = ["--model.positions", "learned"]
    cli.main(["train", "--data.corpus", "text.txt", "--out", "l", *SMALL, *learned])
    line = refused(capsys, "evaluate", "l", "--memory-length", "500")
    assert "lower memory_length or set clamp_length" in line
    cli.main(["evaluate", "l", "--memory-length", "4"])
    # A longer memory leaves less of the table to a segment.
    table = load_config(Path("l")).model.max_distance
    cli.main(["evaluate", "l", "--memory-length", str(table - 1)])
    assert "segment 1," in capsys.readouterr().out


def test_a_text_is_scored_on_top_of_a_memory(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("p").write_bytes(TEXT[100:300])
    cli.main(["generate", "run", "--prompt-file", "p", "--tokens", "0", "--save-memory", "m"])
    how = ["--corpus", "text.txt", "--tokens", "8", "--device", "cpu"]
    without, found = scored(capsys, *how), scored(capsys, *how, "--memory", "m")
    assert (without["tokens_before"], found["tokens_before"]) == (0, 200)
    # By hand: one segment on top of the memory.
    loaded = memspan.load("run", "cpu")
    assert isinstance(loaded.model, LanguageModel)
    whole = text_of(loaded, "text.txt", None, "validation", False).tokens[:8]
    targets = torch.from_numpy(whole.astype(int))[None]
    inputs = torch.cat([torch.zeros_like(targets[:, :1]), targets[:, :-1]], 1)
    losses = loaded.model.reader(loaded.model.load_memory("m")).read(inputs, targets=targets)
    assert found["nats"] == pytest.approx(losses.sum().item(), abs=1e-5)
    assert abs(without["nats"] - found["nats"]) > 1e-4
    cli.main(["evaluate", "run", *how, "--memory", "m"])
    assert "on top of m" in capsys.readouterr().out
    for flags, says in [
        (["--batch-size", "2"], "batch size of 1"),
        (["--memory-length", "4"], "drop memory_length"),
    ]:
        assert says in refused(capsys, "evaluate", "run", *how, "--memory", "m", *flags)


def test_a_text_from_standard_input_is_scored(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a whole, unless a part of it is asked for."""
    for split, options in {"all": [], "validation": ["--split", "validation"]}.items():
        of_file = scored(capsys, "--corpus", "text.txt", "--split", split)
        pipe(monkeypatch, TEXT)
        piped = scored(capsys, "--corpus", "-", *options)
        assert (piped["corpus"], piped["split"]) == ("standard input", split)
        assert piped["nats"] == of_file["nats"]
    pipe(monkeypatch, b"")
    assert "standard input is empty" in refused(capsys, "evaluate", "run", "--corpus", "-")
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is closed" in refused(capsys, "evaluate", "run", "--corpus", "-")


@pytest.mark.parametrize("batch_size", [1, 3])
def test_losses_of_all_tokens_are_written(
    run: Path, capsys: pytest.CaptureFixture[str], batch_size: int
) -> None:
    how = ["--split", "train", "--tokens", "50", "--batch-size", str(batch_size)]
    how += ["--segment-length", "1", "--per-token"]
    scores = scored(capsys, *how, "losses.jsonl")
    lines = [json.loads(line) for line in Path("losses.jsonl").read_text().splitlines()]
    lines.sort(key=lambda line: line["position"])
    assert [line["position"] for line in lines] == list(range(50))
    assert bytes(line["token"] for line in lines) == Path("text.txt").read_bytes()[:50]
    assert sum(line["nats"] for line in lines) == pytest.approx(scores["nats"], rel=1e-4)
    assert "losses.jsonl exists: give --per-token another path" in refused(
        capsys, "evaluate", "run", *how, "losses.jsonl"
    )
    impossible = ["--batch-size", "999", "--per-token", "none.jsonl"]
    assert "lower" in refused(capsys, "evaluate", "run", "--tokens", "50", *impossible)
    assert not Path("none.jsonl").exists()
    assert "no folder no: check --per-token" in refused(
        capsys, "evaluate", "run", *how, "no/x.jsonl"
    )
