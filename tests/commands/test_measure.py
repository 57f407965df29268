"""``memspan measure`` and ``memspan.measure``: of runs and other models, whole and cut short."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import command_line
import memspan
from command_line import printed
from memspan.lab import cli
from memspan.lab.measurement import repeats, report, span, statistics
from memspan.lab.measurement.report import Report
from statelaws import Function, Inputs

TEXT = command_line.TEXT.decode()
pytestmark = pytest.mark.usefixtures("text_file", "models", "one_round")
WORDS = """
train --data.corpus text.txt --data.tokenizer characters --out words --model lstm
--model.n-layers 1 --model.d-model 8 --train.steps 2 --train.batch-size 2
--train.segment-length 8 --train.evaluate-tokens 32 --train.sample-tokens 2
"""
PLENTY = ["--budget", "1000"]


@pytest.fixture
def words(text_file: None) -> None:
    """A run of an LSTM, whose tokens are characters."""
    cli.main(WORDS.split())


@pytest.mark.plots
def test_measure_prints_and_writes_numbers(
    run: Path, words: None, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ["--longest", "64", *PLENTY]
    said = printed(capsys, "measure", "run", "words", "--out", "report", *quick)
    assert "different tokenisers" in said
    found = json.loads(Path("report/measure.json").read_text())
    first, second = found["runs"]
    assert [p["history"] for p in first["span"]["points"]] == [1, 2, 4, 8, 16, 32, 64]
    assert first["span"]["blocks"] == 8
    assert "in 8 blocks" in said
    (sizes,) = first["memory_lengths"]
    assert sizes["blocks"] >= 2
    assert [p["slots"] for p in sizes["points"]] == [0, 2, 4, 8, 16, 32]
    assert sizes["points"][3]["difference"]["value"] == 0
    assert [p["distance"] for p in first["repeats"]["points"]] == [16, 32, 64]
    assert first["attention"]["layers"][0]["by_kind"].keys() == {"memory", "segment"}
    assert second["attention"] is None
    assert any("no size to vary" in line for line in second["left_out"])
    assert Path("report/measure.png").read_bytes().startswith(b"\x89PNG")


def test_one_run_is_answered_first_within_the_terminals_width(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    measured = memspan.measure("run", longest=32, budget=1000)
    assert measured.span is not None
    found = dataclasses.replace(measured.span, tokens=8, low=4, high=16, beyond=False)
    said = report.printed(Report([dataclasses.replace(measured, span=found)]))
    first, overview, *_ = said.split("\n\n")
    assert re.fullmatch(r"run uses 8 (bytes|tokens) of history \(95 % interval: 4 to 16\)\.", first)
    title, run_of, *lines = overview.splitlines()
    assert title == "Span"
    assert run_of.split() == ["run", "run"]
    assert len(lines) > 8
    # A path is not cut.
    assert max(len(line) for line in lines if "text.txt" not in line) <= 80


@pytest.mark.plots
def test_the_picture_marks_each_span(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = memspan.measure("run", longest=32, budget=1000)
    assert measured.span is not None
    found = {8: (8, False), 32: (32, True), None: (None, False)}
    spans = [
        dataclasses.replace(measured.span, tokens=tokens, beyond=beyond)
        for tokens, beyond in found.values()
    ]
    runs = [
        dataclasses.replace(measured, run=f"run-{n}", span=each) for n, each in enumerate(spans)
    ]
    figure = pytest.importorskip("matplotlib.figure").Figure()
    monkeypatch.setattr(report, "png", lambda draw, *size, dpi: draw(figure))
    report.picture(Report(runs))
    axes = figure.axes[0]
    upright = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert [line.get_label() for line in upright] == ["span: 8", "span: at least 32"]
    assert [line.get_xdata()[0] for line in upright] == [8, 32]
    curves = [line for line in axes.lines if line.get_linestyle() == "-"]
    assert [line.get_color() for line in upright] == [line.get_color() for line in curves[:2]]


def test_report_has_notes_on_the_numbers(run: Path) -> None:
    long, short = (memspan.measure("run", longest=n, budget=1000) for n in (64, 16))
    (few,) = Report([long]).notes
    assert "measured on 8 blocks of text, and intervals from fewer than 50 are rough" in few
    # A loss that rises with history.
    assert long.span is not None
    *points, _, last = long.span.points
    low = span.SpanPoint(32, last.bits_per_byte - 1, statistics.Estimate(-1, -1.1, -0.9))
    rising = dataclasses.replace(long.span, points=(*points, low, last))
    note, _ = Report([dataclasses.replace(long, span=rising)]).notes
    assert "lowest with 32 tokens" in note
    without = dataclasses.replace(rising, tokens=None)
    assert "none: worst with the longest" in report.printed(
        Report([dataclasses.replace(long, span=without)])
    )
    # Memories that were not full.
    (sizes,) = short.memory_lengths
    assert [p.slots for p in sizes.points if not p.full] == [32]
    assert any(line.startswith("memory_length 32: not full") for line in short.left_out)
    assert "32, not full" in report.printed(Report([short]))
    # Different longest histories are not compared.
    both = Report([long, dataclasses.replace(short, run="other")])
    assert any("longest histories differ (16, 64 tokens)" in note for note in both.notes)
    assert {row.longest for row in both.effective_context} <= {16}


def test_a_short_text_is_measured_as_far_as_it_goes(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Path("short.jsonl").write_text(json.dumps({"body": TEXT[:300]}))
    found = memspan.measure("run", "short.jsonl", field="body", split="all", budget=1000)
    assert found.longest == 128
    assert "distances over 128" in found.left_out[0]
    assert "distances over 128" in caplog.text


def test_a_run_that_fails_loses_no_other(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["measure", "run", "models.py:few", "--longest", "16", *PLENTY])
    assert stop.value.code == 2
    assert "models.py:few has 64 tokens and no tokeniser" in capsys.readouterr().err
    (found,) = json.loads(Path("run/measure.json").read_text())["runs"]
    assert found["span"] is not None


def test_keeps_results_after_an_interrupt(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(repeats, "measured", interrupt)
    with pytest.raises(SystemExit) as stop:
        cli.main(["measure", "run", "--longest", "16", *PLENTY])
    assert stop.value.code == 130
    (found,) = json.loads(Path("run/measure.json").read_text())["runs"]
    assert found["interrupted"]
    assert found["span"] is not None
    assert "repeats: interrupted" in found["left_out"]


@pytest.mark.plots
def test_a_picture_shows_names_as_they_are_and_may_fail(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn: set[str] = set()
    savefig = figure.savefig
    name = "cost $x^$"

    def fail(self: Any, *arguments: Any, **options: Any) -> None:
        savefig(self, *arguments, **options)
        for axes in self.axes:
            texts = [axes.title, *axes.get_legend().get_texts()]
            drawn.update(text.get_text().strip() for text in texts)
        raise ValueError("a font\nis broken")

    monkeypatch.setattr(figure, "savefig", fail)
    run.rename(name)
    Path(name, "measure.json").write_text("an earlier one")
    cli.main(["measure", name, "--longest", "16", *PLENTY])
    # In a legend, and in a title.
    assert drawn >= {name, f"{name}: attention by distance"}
    # Nothing else is lost.
    said = capsys.readouterr()
    assert "no picture: matplotlib cannot draw it (a font is broken)\n" in said.err
    assert f"replaced: {name}/measure.json\n" in said.out
    assert json.loads(Path(name, "measure.json").read_text())["runs"]
    assert not Path(name, "measure.png").exists()


def test_measures_a_foreign_model_beside_a_run(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run beside it reads the same tokens."""
    options = ["--corpus", "text.txt", "--longest", "64", *PLENTY]
    said = printed(capsys, "measure", "models.py:made", "run", *options)
    found = json.loads(Path("measure.json").read_text())
    first, second = found["runs"]
    assert first["run"] == "models.py:made"
    assert first["vocabulary"] == second["vocabulary"]
    assert first["span"]["blocks"] == 8
    assert "8 blocks" in said
    assert first["state_bytes"] == 32
    assert first["span"]["low"] <= first["span"]["tokens"] <= first["span"]["high"]
    assert [p["distance"] for p in first["repeats"]["points"]] == [16, 32, 64]
    assert found["effective_context"]
    assert any("for runs of memspan" in line for line in first["left_out"])


def test_a_model_by_its_object_and_of_other_tokens(run: Path, words: None) -> None:
    """The run's own tokeniser for a model of the same characters."""
    options = {"corpus": "text.txt", "longest": 64, "budget": 1000}
    of_name = memspan.measure("models.py:few", tokenizer="words/tokenizer.json", **options)
    assert of_name.tokenizer == "characters"
    of_object = memspan.measure(memspan.load("run").model, **options)
    assert of_object.tokenizer == "bytes"
    assert of_object.span is not None
    Path("two.jsonl").write_text((json.dumps({"text": TEXT}) + "\n") * 2)
    for corpus, documents in (("two.jsonl", 1), ("text.txt", 0)):
        found = memspan.measure("models.py:made", split="all", **options | {"corpus": corpus})
        begin = "where documents begin: they are read as one text"
        assert found.left_out[:1].count(begin) == documents == str(found.left_out).count("docum")


@pytest.mark.usefixtures("text_file")
def test_refuses_a_state_without_effect() -> None:
    logits = torch.nn.Embedding(256, 256)
    options: dict[str, Any] = {"corpus": "text.txt", "longest": 16, "budget": 1000}
    inputs = Inputs(vocab_size=256)
    unused = Function(lambda x, s: (logits(x), x[:, -1]), torch.zeros, inputs, logits)
    with pytest.raises(memspan.MemspanError, match="the state that was passed has no effect"):
        memspan.measure(unused, **options)
    without = Function(lambda x, s: (logits(x), None), lambda rows: None, inputs, logits)
    found = memspan.measure(without, split="all", **options)
    assert found.span is not None
    assert any("it carries no state" in line for line in found.left_out)
