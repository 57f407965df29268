"""``memspan evaluate`` and ``memspan generate``: what they print, and read on top of what."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import memspan
from command_line import SMALL, TEXT, pipe, printed, refused
from memspan.errors import MemspanError
from memspan.lab import cli
from memspan.lab.runs.options import load_config

pytestmark = pytest.mark.usefixtures("text_file")


def scored(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """The scores of the run ``run``."""
    found: dict[str, Any] = json.loads(printed(capsys, "evaluate", "run", "--json", *options))
    return found


def test_evaluates_with_another_attention_span(
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
    said = printed(capsys, "evaluate", "run", "--tokens", "90", "--batch-size", "3", *other)
    assert "memory 8, attention span fixed, clamp length 5" in said
    assert "3 streams" in said
    cli.main(["generate", "run", "--tokens", "5", *other])


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
    assert "segment 1," in printed(capsys, "evaluate", "l", "--memory-length", table - 1)


def by_hand(ids: Sequence[int], before: int = 0, memory: str | None = None) -> torch.Tensor:
    """The losses of tokens after ``before``, read in one call with a fixed span."""
    model = memspan.load("run", "cpu").model
    start = model.initial_memory(1) if memory is None else model.load_memory(memory)
    reader = model.reader(start, attention_span="fixed")
    targets = torch.tensor([[*ids]])
    return reader.read(torch.tensor([[before, *ids[:-1]]]), targets=targets)[0]


def test_a_text_is_scored_on_top_of_a_memory(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("p").write_bytes(TEXT[100:300])
    cli.main(["generate", "run", "--prompt-file", "p", "--tokens", "0", "--save-memory", "m"])
    how = ["--corpus", "text.txt", "--tokens", "8", "--device", "cpu", "--attention-span", "fixed"]
    without = scored(capsys, *how)
    found = scored(capsys, *how, "--memory", "m")
    assert (without["tokens_before"], found["tokens_before"]) == (0, 200)
    losses = by_hand(TEXT[len(TEXT) * 90 // 100 :][:8], memory="m")
    assert found["nats"] == pytest.approx(losses.sum().item(), abs=1e-5)
    assert abs(without["nats"] - found["nats"]) > 1e-4
    on_top = ["evaluate", "run", *how, "--memory", "m"]
    assert "on top of m" in printed(capsys, *on_top)
    assert "batch size of 1" in refused(capsys, *on_top, "--batch-size", "2")
    assert "drop memory_length" in refused(capsys, *on_top, "--memory-length", "4")


@pytest.mark.parametrize("borders", [[0, 50], [0, 17, 34, 50]], ids=["1 stream", "3 streams"])
def test_losses_of_all_tokens_are_written(
    run: Path, capsys: pytest.CaptureFixture[str], borders: list[int]
) -> None:
    """Each stream begins after the last token of the one before, with an empty memory."""
    how = ["--split", "train", "--tokens", "50", "--batch-size", str(len(borders) - 1)]
    how += ["--segment-length", "5", "--attention-span", "fixed", "--per-token", "losses.jsonl"]
    scores = scored(capsys, *how)
    lines = [json.loads(line) for line in Path("losses.jsonl").read_text().splitlines()]
    lines.sort(key=lambda line: line["position"])
    assert [line["position"] for line in lines] == list(range(50))
    assert bytes(line["token"] for line in lines) == TEXT[:50]
    expected = [
        by_hand(TEXT[first:last], TEXT[first - 1] if first else 0)
        for first, last in pairwise(borders)
    ]
    nats = torch.cat(expected).tolist()
    assert [line["nats"] for line in lines] == pytest.approx(nats, abs=1e-4)
    assert scores["nats"] == pytest.approx(sum(nats), rel=1e-5)
    assert scores["bits_per_byte"] == pytest.approx(sum(nats) / math.log(2) / 50, rel=1e-5)
    assert scores["perplexity"] == pytest.approx(math.exp(sum(nats) / 50), rel=1e-5)
    line = refused(capsys, "evaluate", "run", *how)
    assert "losses.jsonl exists: give --per-token another path" in line


def test_a_text_from_standard_input_is_scored(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it, unless a part is asked for."""
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


def test_greedy_samples_are_the_likeliest_tokens(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write = partial(printed, capsys, "generate", "run", "--prompt", "the", "--tokens", "20")
    greedy = write("--greedy")
    assert greedy == write("--top-k", "1")
    samples = write("--greedy", "--samples", "2")
    assert samples == "".join(f"--- sample {n} ---\n{greedy}" for n in (1, 2))
    too_many = r"10,000,000,000 samples would take at least .* lower --samples"
    with pytest.raises(MemspanError, match=too_many):
        memspan.generate("run", samples=10**10)


def test_a_saved_memory_overwrites_no_other_file(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = ["generate", "run", "--tokens", "2", "--save-memory"]
    for path in (run / "model.safetensors", Path("text.txt"), run):
        before = path.stat().st_mtime_ns
        assert "is not a memory file" in refused(capsys, *save, path, "--force")
        assert path.stat().st_mtime_ns == before
    Path("m").touch()
    cli.main([*save, "m"])
    assert "already holds a memory" in refused(capsys, *save, "m")
    cli.main([*save, "m", "--force"])


def test_a_prompt_may_come_from_standard_input(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("p").write_bytes(TEXT[:700])
    said = []
    for name in ("p", "-"):
        with open("p") as file:
            monkeypatch.setattr(sys, "stdin", file)
            write = ["generate", "run", "--prompt-file", name, "--tokens", "9", "--seed", "1"]
            said.append(printed(capsys, *write))
    assert said[0] == said[1]
    end, start = os.pipe()
    os.write(start, b"ab")
    with open(end) as file:
        monkeypatch.setattr(sys, "stdin", file)
        for options in (["--prompt", "ab"], []):
            cli.main(["generate", "run", "--tokens", "1", *options])
            warned = "standard input is not read" in capsys.readouterr().err
            assert warned == (not options)
    os.close(start)


@pytest.mark.parametrize("name", ["--prompt", "--prompt-file", "--stop"])
def test_an_option_that_would_replace_itself_is_refused(
    name: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["generate", "run", name, "one", f"{name.replace('t-f', 't_f')}=two"])
    error = capsys.readouterr().err
    assert error.startswith(f"memspan: {name} is given more than once: ")
    assert error.count("\n") == 1


def test_prints_samples_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write = ["generate", "run", "--prompt", "ab", "--tokens", "9", "--seed", "1", "--samples", "2"]
    found = json.loads(printed(capsys, *write, "--json"))
    assert (found["run"], found["prompt"]) == ("run", "ab")
    plain = printed(capsys, *write)
    for sample in found["samples"]:
        assert f"ab{sample['text']}\n" in plain
        assert bytes(sample["tokens"]).decode(errors="replace").startswith(sample["text"])
        assert len(sample["tokens"]) == 9
