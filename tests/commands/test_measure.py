"""``memspan measure`` and ``memspan.measure``: good input, bad input, little time."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import command_line
import memspan
from command_line import refused
from memspan import cli
from memspan.measurement import repeats, span, statistics
from memspan.measurement.report import Report, printed

TEXT = command_line.TEXT.decode()
pytestmark = pytest.mark.usefixtures("text_file", "one_round")


OPTIONS = """
--model lstm --model.n-layers 1 --model.d-model 8 --train.steps 2 --train.batch-size 2
--train.segment-length 8 --train.evaluate-tokens 32 --train.sample-tokens 2
"""


def train(name: str, *more: str) -> None:
    cli.main(["train", *OPTIONS.split(), "--data.corpus", "text.txt", "--out", name, *more])


@pytest.mark.plots
def test_the_verb(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train("words", "--data.tokenizer", "characters")
    capsys.readouterr()
    quick = ["--longest", "64", "--budget", "1000"]
    cli.main(["measure", "run", "words", "--out", "report", *quick])
    printed = capsys.readouterr().out
    assert "different tokenisers" in printed
    found = json.loads(Path("report/measure.json").read_text())
    first, second = found["runs"]
    assert [p["history"] for p in first["span"]["points"]] == [1, 2, 4, 8, 16, 32, 64]
    assert first["span"]["blocks"] == 8
    assert "in 8 blocks" in printed
    (sizes,) = first["memory_lengths"]
    assert sizes["blocks"] >= 2
    assert [p["slots"] for p in sizes["points"]] == [0, 2, 4, 8, 16, 32]
    assert sizes["points"][3]["difference"]["value"] == 0
    assert [p["distance"] for p in first["repeats"]["points"]] == [16, 32, 64]
    assert first["attention"]["layers"][0]["by_kind"].keys() == {"memory", "segment"}
    assert second["attention"] is None
    assert any("no size to vary" in line for line in second["left_out"])
    page = Path("report/measure.html").read_text()
    assert "http" not in page
    assert 'src="data:image/png' in page
    assert Path("report/measure.png").read_bytes().startswith(b"\x89PNG")


def test_a_loss_that_rises_with_history_is_said(run: Path) -> None:
    found = memspan.measure("run", longest=64, budget=1000)
    assert found.span is not None
    assert not Report([found]).notes
    *points, _, last = found.span.points
    low = span.SpanPoint(32, last.bits_per_byte - 1, statistics.Estimate(-1, -1.1, -0.9))
    rising = dataclasses.replace(found.span, points=(*points, low, last))
    (note,) = Report([dataclasses.replace(found, span=rising)]).notes
    assert "lowest with 32 tokens" in note


def test_a_short_text_is_measured_as_far_as_it_goes(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Path("short.jsonl").write_text(json.dumps({"body": TEXT[:300]}))
    found = memspan.measure("run", "short.jsonl", field="body", split="all", budget=1000)
    assert found.longest == 128
    assert "distances over 128" in found.left_out[0]
    assert "distances over 128" in caplog.text


def test_memories_that_were_not_full_are_said(run: Path) -> None:
    found = memspan.measure("run", longest=16, budget=1000)
    (sizes,) = found.memory_lengths
    assert [p.slots for p in sizes.points if not p.full] == [32]
    assert any(line.startswith("memory_length 32: not full") for line in found.left_out)
    assert "32, not full" in printed(Report([found]))


def test_a_run_that_fails_loses_no_other(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy("text.txt", "gone.txt")
    train("second", "--data.corpus", "gone.txt")
    Path("gone.txt").unlink()
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        cli.main(["measure", "run", "second", "--longest", "16", "--budget", "1000"])
    assert stop.value.code == 2
    assert "gone.txt: say where it is with --corpus PATH" in capsys.readouterr().err
    (found,) = json.loads(Path("run/measure.json").read_text())["runs"]
    assert found["span"] is not None


def test_runs_with_different_longest_histories_are_not_compared(run: Path) -> None:
    shutil.copytree("run", "other")
    runs = [memspan.measure("run", longest=64, budget=1000)]
    runs.append(memspan.measure("other", longest=32, budget=1000))
    report = Report(runs)
    assert any("longest histories differ (32, 64 tokens)" in note for note in report.notes)
    assert {row.longest for row in report.effective_context} <= {32}


def test_what_is_done_is_kept_after_an_interrupt(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(repeats, "measured", interrupt)
    with pytest.raises(SystemExit) as stop:
        cli.main(["measure", "run", "--longest", "16", "--budget", "1000"])
    assert stop.value.code == 130
    (found,) = json.loads(Path("run/measure.json").read_text())["runs"]
    assert found["interrupted"]
    assert found["span"] is not None
    assert "repeats: interrupted" in found["left_out"]


@pytest.mark.plots
def test_a_name_is_drawn_as_it_is(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    drawn: list[str] = []
    savefig, name = figure.Figure.savefig, "cost $x^$"

    def watched(self: Any, *arguments: Any, **options: Any) -> None:
        savefig(self, *arguments, **options)
        for axes in self.axes:
            drawn.extend((axes.get_title(), *(t.get_text() for t in axes.get_legend().get_texts())))

    monkeypatch.setattr(figure.Figure, "savefig", watched)
    run.rename(name)
    cli.main(["measure", name, "--longest", "16", "--budget", "1000"])
    # In a legend, and in a title.
    assert {text.strip() for text in drawn} >= {name, f"{name}: attention by distance"}


@pytest.mark.plots
def test_a_picture_that_fails_loses_nothing_else(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = pytest.importorskip("matplotlib.figure")

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("a font\nis broken")

    monkeypatch.setattr(figure.Figure, "savefig", fail)
    cli.main(["measure", "run", "--longest", "16", "--budget", "1000"])
    said = capsys.readouterr()
    assert "no picture: matplotlib cannot draw it (a font is broken)\n" in said.err
    assert "written: run/measure.html\n" in said.out
    assert json.loads(Path("run/measure.json").read_text())["runs"]
    assert not Path("run/measure.png").exists()


MODELS = """
import torch

from memspan.stateful import Function, Inputs


class Reads(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.embedding = torch.nn.Embedding(size, 8)
        self.rnn = torch.nn.GRU(8, 8, batch_first=True)
        self.head = torch.nn.Linear(8, size)

    def hidden(self, tokens, state):
        return self.rnn(self.embedding(tokens), state)

    def forward(self, tokens, state):
        hidden, state = self.hidden(tokens, state)
        return self.head(hidden), state


def made(size=256, name="forward"):
    module = Reads(size)
    read, first = getattr(module, name), lambda rows: torch.zeros(1, rows, 8)
    return Function(read, first, Inputs(size), module=module)


def few():
    return made(size=64)


def headless():
    return made(name="hidden")


vectors = torch.nn.GRU(8, 8)
"""


def test_a_model_that_is_no_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside a run, on the same tokens."""
    Path("models.py").write_text(MODELS)
    capsys.readouterr()
    targets, options = ["models.py:made", "run"], ["--longest", "64", "--budget", "1000"]
    cli.main(["measure", *targets, "--corpus", "text.txt", *options])
    printed = capsys.readouterr().out
    found = json.loads(Path("measure.json").read_text())
    first, second = found["runs"]
    assert first["run"] == "models.py:made"
    assert first["vocabulary"] == second["vocabulary"]
    assert first["span"]["blocks"] == 8
    assert "8 blocks" in printed
    assert first["state_bytes"] == 32
    assert first["span"]["low"] <= first["span"]["tokens"] <= first["span"]["high"]
    assert [p["distance"] for p in first["repeats"]["points"]] == [16, 32, 64]
    assert found["effective_context"]
    assert any("for runs of memspan" in line for line in first["left_out"])


def test_a_model_by_its_object_and_of_other_tokens(run: Path) -> None:
    """The run's own tokeniser for a model of the same characters."""
    train("words", "--data.tokenizer", "characters")
    Path("models.py").write_text(MODELS)
    options = {"corpus": "text.txt", "longest": 64, "budget": 1000}
    of_name = memspan.measure("models.py:few", tokenizer="words/tokenizer.json", **options)
    assert of_name.tokenizer == "characters"
    of_object = memspan.measure(memspan.load("run").model, **options)
    assert of_object.tokenizer == "bytes"
    assert of_object.span is not None
    Path("two.jsonl").write_text((json.dumps({"text": TEXT}) + "\n") * 2)
    options["corpus"] = "two.jsonl"
    both = memspan.measure("models.py:made", split="all", **options)
    one = memspan.measure("models.py:made", **(options | {"corpus": "text.txt", "split": "all"}))
    assert both.left_out[0] == "where documents begin: they are read as one text"
    assert not any("documents" in line for line in one.left_out)


MISTAKES = {
    "run --budget 1e-9": "too small to measure anything of run",
    "run --budget 0": "budget must be more than 0",
    "run --corpus tiny.txt": "needs at least 32",
    "no-run": "no-run",
    "empty": "neither a run",
    "run --out text.txt": "--out text.txt is not a folder",
    "run --tokenizer bytes": "has its own tokeniser",
    "models.py:few": "has 64 tokens and no tokeniser, and bytes are 256: give its tokeniser",
    "models.py:few --tokenizer bytes": "has 64 tokens, but this tokeniser gives the text others",
    "models.py:headless": "where logits are [B, T, 256]: give one with a language model's head",
    "models.py:vectors": "reads vectors, and a text is tokens: give a language model",
    "models.py:made --precision bfloat16": "is not a run: drop --precision",
    "models.py:made --field body --corpus text.txt": "drop it",
    "models.py:made --tokenizer missing.json": "cannot read missing.json",
}


def test_bad_input_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("tiny.txt").write_text("tiny")
    Path("empty").mkdir()
    Path("models.py").write_text(MODELS)
    for arguments, says in MISTAKES.items():
        assert says in refused(capsys, "measure", *arguments.split())
