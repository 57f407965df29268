"""Identity of a run: its files, its folder, its corpus; nothing else goes on in its place."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import memspan
import tiny_runs
from command_line import refused
from memspan.errors import MemspanError
from memspan.lab import cli
from memspan.lab.data.corpora import load_corpus, located
from memspan.lab.data.options import DataConfig
from memspan.lab.data.prepared import prepare
from memspan.lab.data.token_files import difference, identity
from memspan.lab.data.tokenizers.plain import ByteTokenizer
from memspan.lab.runs import checkpoints, history
from memspan.lab.runs.options import RunConfig
from memspan.lab.training import metrics, start
from memspan.lab.training.options import OptimConfig
from tiny_runs import OPTIONS, TEXT, assert_same, at_step, content, cut_at

pytestmark = pytest.mark.usefixtures("tiny_text")


def cut_run(config: RunConfig[Any] = OPTIONS) -> None:
    """A run whose process was killed after five updates."""
    with cut_at(5):
        start.train(config, Path("r"))


@pytest.mark.parametrize("replaced", [True, False])
def test_a_folder_that_is_moved_while_training_ends_it(replaced: bool) -> None:
    """Another run under its old name is left alone, to the byte."""
    start.train(OPTIONS, Path("whole"))

    def move(_: object) -> None:
        Path("r").rename("moved")
        if replaced:
            shutil.copytree("whole", "r")

    with (
        pytest.raises(MemspanError, match=r"folder r was moved, deleted or replaced .*--resume"),
        at_step(3, move),
    ):
        start.train(OPTIONS, Path("r"))
    assert content("r") == (content("whole") if replaced else {})
    start.resume(Path("moved"))
    assert_same("moved", "whole")
    steps = [r["step"] for r in metrics.read(Path("moved/metrics.jsonl"))]
    assert steps == [r["step"] for r in metrics.read(Path("whole/metrics.jsonl"))]


TEXTS = {"a": TEXT[:500], "b": TEXT[:400], "c": TEXT[:30], "d": TEXT[:20], "e": TEXT[:50]}
"""Files of a folder: the first two are training text, the next two are for validation."""
MOVED = "the documents of its {} split begin elsewhere"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"a": TEXT[:500].replace("remains", "returns")}, "its train split is another text"),
        ({"c": TEXT[:30].upper()}, "its validation split is another text"),
        ({"a": TEXT[:500] + TEXT[0], "b": TEXT[1:400]}, MOVED.format("train")),
        ({"c": TEXT[:30] + TEXT[0], "d": TEXT[1:20]}, MOVED.format("validation")),
    ],
)
def test_another_split_or_border_is_known(change: dict[str, str], says: str | None) -> None:
    Path("texts").mkdir()
    found = []
    for texts in (TEXTS, TEXTS | change):
        for name, text in texts.items():
            Path("texts", f"{name}.txt").write_text(text)
        found.append(identity(prepare("texts", "bytes").splits))
    assert difference(*found) == says


def test_splits_that_come_and_go() -> None:
    whole = {name: {"tokens": name, "document_starts": "0"} for name in ("train", "validation")}
    train_only = {"train": whole["train"]}
    assert difference(whole, train_only) == "its validation split is missing"
    assert difference(train_only, whole) == "its validation split is new"
    assert difference(whole, train_only, ["train"]) is None


def test_evaluate_says_whether_a_text_has_changed(capsys: pytest.CaptureFixture[str]) -> None:
    start.train(OPTIONS, Path("r"))

    def scored(*more: str) -> tuple[Any, str]:
        capsys.readouterr()
        cli.main(["evaluate", "r", "--json", *more])
        out, said = capsys.readouterr()
        values = json.loads(out)
        return (Path(values["corpus"]).name, values["split"], values["as_in_training"]), said

    assert scored() == (("text.txt", "validation", True), "")
    shutil.copy("text.txt", "copy.txt")
    assert scored("--corpus", "copy.txt") == (("copy.txt", "validation", True), "")
    Path("text.txt").write_text(TEXT + "and more")
    values, said = scored()
    assert values == ("text.txt", "validation", False)
    assert "its validation split is another text" in said
    assert len(said.splitlines()) == 1
    assert scored("--corpus", "text.txt") == (("text.txt", "validation", False), "")
    cli.main(["evaluate", "r", "--split", "all"])
    assert f"{Path('text.txt').absolute()}, all: " in capsys.readouterr().out


CONSTANT = OptimConfig(warmup_steps=2, schedule="constant")


def options(**loop: Any) -> RunConfig[Any]:
    return tiny_runs.options(optim=CONSTANT, **loop)


def test_a_finished_run_goes_on_to_more_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights are those of a run that was to make so many steps from the start."""
    start.train(options(steps=12), Path("whole"))
    start.train(options(steps=6), Path("r"))
    published = Path("r/model.safetensors").read_bytes()
    cli.main(["train", "--resume", "r", "--train.steps", "9", "--train.save-every", "3"])
    said = " ".join(capsys.readouterr().out.split())
    assert "train.steps 6 -> 9, train.save_every 2 -> 3" in said
    start.resume(Path("r"), config=options(steps=12))
    assert_same("r", "whole")
    assert Path("r/config.toml").read_bytes() == Path("whole/config.toml").read_bytes()
    changed = [(c.step, c.changed) for c in history.read(Path("r"))]
    assert changed == [
        (6, {"train.steps": [6, 9], "train.save_every": [2, 3]}),
        (9, {"train.steps": [9, 12], "train.save_every": [3, 2]}),
    ]
    # Weights that were published before the changes are still this run's.
    Path("r/model.safetensors").unlink()
    Path("r/model.safetensors").write_bytes(published)
    assert memspan.load("r").config.train.steps == 12


def test_any_option_of_training_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_run()
    new = dataclasses.replace(
        options(segment_length=8, accumulate=2, precision="bfloat16", recompute=True, save_every=0),
        optim=OptimConfig(learning_rate=1e-3, weight_decay=0.0, beta2=0.9, clip_norm=0.0),
    )
    console = Console(file=io.StringIO(), record=True, width=1000)
    start.resume(Path("r"), console=console, config=new)
    assert "; learning rate here 0.00105 -> 5e-05\n" in console.export_text()
    saved = checkpoints.latest(Path("r")).state
    assert saved["environment"]["precision"] == "bfloat16"
    # Four segments of 4, and two steps of two segments of 8.
    assert saved["streams"]["tokens_read"] == 4 * 4 + 2 * 2 * 8
    last = metrics.read(Path("r/metrics.jsonl"))[-1]
    assert (last["step"], last["tokens"]) == (6, 2 * saved["streams"]["tokens_read"])


def test_another_environment_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cut_run()
    start.resume(shutil.copytree("r", "same"), console=Console(width=900))
    assert "another environment" not in capsys.readouterr().out
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NONE")
    start.resume(Path("r"), console=Console(width=900))
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "another environment" in x]
    assert ', now "NONE"; threads 1, now 7)' in line
    assert "its weights may differ" in line
    assert checkpoints.latest(Path("r")).state["environment"]["threads"] == 7


def test_runs_work_from_any_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Paths of its text and tokeniser are absolute; given again, they are no change."""
    ByteTokenizer().save(tmp_path)
    cut_run(dataclasses.replace(OPTIONS, data=DataConfig("text.txt", "tokenizer.json")))
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    start.resume(Path("../r"))
    cli.main(["evaluate", "../r"])
    Path("../text.txt").rename("book.txt")
    assert "give its new path with --corpus PATH" in refused(capsys, "evaluate", "../r")
    more = ["train", "--resume", "../r", "--train.steps", "8"]
    assert "give its new path with --data.corpus PATH" in refused(capsys, *more)
    cli.main([*more, "--data.corpus", "book.txt", "--data.tokenizer", "../tokenizer.json"])
    data = memspan.load("../r").config.data
    assert data.corpus == str(tmp_path / "elsewhere/book.txt")
    assert data.tokenizer == str(tmp_path / "tokenizer.json")


def test_files_of_a_glob_keep_their_splits_where_their_folder_moves() -> None:
    Path("a/texts").mkdir(parents=True)
    for n in range(40):
        Path(f"a/texts/{n}.txt").write_text(f"text {n}")
    Path("b").mkdir()
    before = load_corpus("a/*/*.txt").record["sha256"]
    assert load_corpus(located("a/*/*.txt")).record["sha256"] == before
    Path("a/texts").rename("b/texts")
    assert load_corpus("b/*/*.txt").record["sha256"] == before


@pytest.mark.parametrize("left", [(), ("r",), ("r", "r/checkpoints")], ids=["none", "root", "two"])
def test_a_folder_that_is_deleted_in_a_save_is_not_made_anew(
    left: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor in part: whoever deletes it may be half-way."""
    original = checkpoints.write_tensors

    def delete_first(*arguments: Any) -> Any:
        shutil.rmtree("r")
        for folder in left:
            Path(folder).mkdir()
        return original(*arguments)

    monkeypatch.setattr(checkpoints, "write_tensors", delete_first)
    with pytest.raises(MemspanError, match="moved, deleted or replaced while it was trained"):
        start.train(OPTIONS, Path("r"))
    assert not [path for path in Path("r").rglob("*") if str(path) not in left]
    assert Path("r").exists() == bool(left)
