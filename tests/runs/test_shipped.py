"""The trained runs that come with memspan: they work anywhere, offline, and nothing writes to them."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

import compressed_recall
import memspan
import shipped_recall
from command_line import refused
from memspan import MemspanError
from memspan.lab import cli
from memspan.lab.measurement import report
from memspan.lab.runs.checkpoint_files import WEIGHTS
from memspan.lab.runs.folder import SHIPPED
from shipped_runs import RECIPES, RESULTS, SPAN, TRAINED, card, table

ROWS = json.loads(RESULTS.read_text())
RECALLED = json.loads(shipped_recall.RESULTS.read_text())

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(autouse=True)
def _offline_and_untouched(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: object) -> NoReturn:
        raise OSError("no network")

    def contents() -> dict[Path, tuple[int, int]]:
        files = [path for path in TRAINED.rglob("*") if "__pycache__" not in path.parts]
        return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}

    monkeypatch.setattr(socket.socket, "connect", refuse)
    before = contents()
    yield
    assert contents() == before


def test_there_is_one_for_each_paper_within_four_megabytes() -> None:
    assert set(SHIPPED) == set(ROWS) | set(RECALLED)
    assert set(ROWS) == set(RECIPES)
    assert len({recipe.architecture for recipe in RECIPES.values()}) == 5
    assert sum(path.stat().st_size for path in TRAINED.rglob("*") if path.is_file()) < 5_000_000
    guide = (DOCS / "guides" / "trained-runs.md").read_text()
    assert table(ROWS) in guide
    assert shipped_recall.table(RECALLED) in guide
    floors = shipped_recall.floors()
    known = f"all answers would reach {floors['all answers']:.2f}, and one that knows no answer"
    assert f"{known} {floors['no answer']:.2f}." in " ".join(guide.split())


@pytest.mark.parametrize("name", ROWS)
def test_it_scores_and_writes_as_its_card_says(name: str, caplog: pytest.LogCaptureFixture) -> None:
    row = ROWS[name]
    run = memspan.load(name)
    scores = memspan.evaluate(run, split="all", tokens=1500)
    # Far below a model that knows only how often each letter appears, 4.8.
    assert scores.bits_per_byte is not None
    assert scores.bits_per_byte < 3
    assert scores.as_in_training
    assert len(memspan.generate(run, "ROMEO:\n", tokens=20).text) == 20
    assert not caplog.records
    assert run.config.architecture == row["architecture"] == RECIPES[name].architecture
    assert run.step == row["steps"] == RECIPES[name].steps
    assert sum(p.numel() for p in run.model.parameters()) == row["parameters"]
    assert (run.folder / WEIGHTS).stat().st_size == row["bytes"]
    assert (run.folder / "README.md").read_text() == card(name, row)
    report = json.loads((RESULTS.parent / SPAN.format(row["architecture"])).read_text())
    assert [(m["run"], m["parameters"]) for m in report["runs"]] == [(name, row["parameters"])]
    assert abs(row["bits_per_byte"] - row["bits_per_byte_float32"]) < 0.001


@pytest.mark.parametrize("name", RECALLED)
def test_a_run_that_recalls_answers_as_its_card_says(name: str) -> None:
    row = RECALLED[name]
    run = memspan.load(name)
    assert (run.folder / "README.md").read_text() == shipped_recall.card(name, row)
    config = shipped_recall.config_of(name)
    assert run.config.model == config.model
    assert (run.step, run.config.optim) == (config.train.steps, config.optim)
    assert (run.folder / WEIGHTS).stat().st_size == row["bytes"]
    assert run.config.train.segment_length == config.train.segment_length
    found = shipped_recall.answers(run, 1000)
    near = [right for back, right in found if back <= shipped_recall.EDGES[1]]
    assert sum(near) / len(near) == pytest.approx(row["right"][0], abs=0.05)
    # Near questions from an empty memory, and those far beyond every edge but that of matrices.
    for between, tolerance in ((4, 0.03), (48, 0.06)):
        stored = row["curve"][shipped_recall.BETWEEN.index(between)]
        assert shipped_recall.right_after(run, between) == pytest.approx(stored, abs=tolerance)
    prompt = "Tom is in Rome. Tom is in Pisa. It rains. Where is Tom?"
    assert memspan.generate(run, prompt, tokens=1).text.strip() == "Pisa."


def test_the_guide_says_where_compressed_facts_are_lost() -> None:
    found = json.loads(compressed_recall.RESULTS.read_text())
    own = found["a slot of its own"]
    first = found["a slot of its own, the text's first"]
    guide = " ".join((DOCS / "guides" / "trained-runs.md").read_text().split())
    full, empty = (
        f"{100 * min(r.values()):.0f} to {100 * max(r.values()):.0f}" for r in (own, first)
    )
    assert f"{full} % of the answers are right there; with none, {empty} %" in guide
    shares = [found[f"with the {how}"]["67"] for how in ("word before", "next fact's name")]
    for share, about in zip(shares, ("right at 67 words)", ""), strict=True):
        assert f"({100 * share:.0f} % {about}".rstrip() in guide
    run = memspan.load("recall-compressive")
    n_right = compressed_recall.n_right(run, 0, 12, compressed_recall.FIRST)
    assert n_right / compressed_recall.FIRST == pytest.approx(first["51"], abs=0.02)
    assert compressed_recall.n_right(run, 32, 12, 60) / 60 > first["51"] + 0.1
    # "Kate is in Rome." begins a segment of 32, and is asked for in the next one but one.
    assert compressed_recall.held(32, 16, 32) == "with the word before"
    assert compressed_recall.held(33, 16, 32) == "with the next fact's name"


def test_a_folder_of_that_name_comes_first() -> None:
    shutil.copytree(SHIPPED["shakespeare-fast-weights"], "shakespeare")
    assert memspan.load("shakespeare").config.architecture == "fast-weights"
    assert memspan.load("shakespeare").folder == Path("shakespeare")
    shutil.rmtree("shakespeare")
    Path("shakespeare").mkdir()
    with pytest.raises(MemspanError, match="it hides the shakespeare that comes"):
        memspan.load("shakespeare")
    Path("shakespeare").rmdir()
    assert memspan.load("shakespeare").folder == SHIPPED["shakespeare"]


def test_a_wrong_name_lists_the_right_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MemspanError, match="comes with memspan: recall-"):
        memspan.load("shakespear")
    said = refused(capsys, "generate", "hamlet")
    assert "no run at hamlet: " in said
    assert all(name in said for name in SHIPPED)


def test_a_report_goes_to_the_current_folder(
    own_folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Drawing takes seconds.
    monkeypatch.setattr(report, "picture", lambda *_: b"")
    cli.main(["measure", "shakespeare-fast-weights", "--budget", "0.5", "--longest", "16"])
    assert f"written: {own_folders / 'measure.json'}" in capsys.readouterr().out
    (measured,) = json.loads(Path("measure.json").read_text())["runs"]
    assert measured["corpus"] == "tiny-shakespeare-held-out"


def test_it_cannot_be_trained_on(capsys: pytest.CaptureFixture[str]) -> None:
    for run in ("shakespeare", str(SHIPPED["shakespeare"])):
        said = refused(capsys, "train", "--resume", run)
        assert "shakespeare comes with memspan and is never changed: train a run of your" in said
        assert "--init-from shakespeare --preset" in said
    assert "never changed" in refused(capsys, "export", "shakespeare")
    said = refused(capsys, "train", "--data.corpus", "tiny-shakespeare-held-out")
    assert "tiny-shakespeare-held-out has no text to train on" in said
    assert not Path("shakespeare").exists()


def test_a_run_of_ones_own_begins_with_its_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """The command that the refusal names."""
    Path("book.txt").write_text("Once upon a time there was a fox. " * 99)
    preset = str(SHIPPED["shakespeare"] / "config.toml")
    start = ["train", "--init-from", "shakespeare", "--preset", preset, "--data.corpus", "book.txt"]
    cli.main([*start, "--out", "fox", "--train.steps", "1", "--train.sample-tokens", "4"])
    said = capsys.readouterr().out
    assert "tensors mapped" in said
    assert "  new:" not in said
    assert "  in part:" not in said
    assert memspan.load("fox").step == 1
