"""Help, lists and presets, and outputs that break or cannot encode what is said."""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

import pytest

from command_line import SMALL, TEXT, printed
from memspan.lab import cli
from memspan.lab.data.named import list_corpora
from memspan.lab.runs.folder import SHIPPED
from memspan.lab.runs.options import PRESETS, read_config
from memspan.models.registry import MODELS

pytestmark = pytest.mark.usefixtures("text_file")

WITHOUT_TORCH = """
import sys
from memspan.lab import cli
for line in sys.stdin:
    status = 0
    try:
        cli.main(line.split())
    except SystemExit as stop:
        status = stop.code or 0
    assert status == (0 if "--help" in line else 2), line
    assert "torch" not in sys.modules, line
"""
MISTAKES = """
generate run --seed -1
generate nowhere
evaluate nowhere
convert nowhere out
evaluate run --corpus nothing.txt
train --train.steps 0
"""


@pytest.mark.processes
def test_help_and_refusals_do_without_torch(run: Path) -> None:
    """Torch takes seconds to import."""
    helps = "".join(f"{verb} --help\n" for verb in ("", *cli.VERBS))
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        input=f"{helps}{MISTAKES.lstrip()}",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # Generous: this guards against a slow import, the target of half a second is measured apart.
    assert time.perf_counter() - start < 10
    assert done.stdout.count("usage: memspan") == 1 + len(cli.VERBS)
    said = " ".join(done.stdout.replace("│", " ").split())
    assert all(name in said for name in PRESETS)


def test_help_names_the_runs_that_come_with_memspan(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert set(SHIPPED) <= {word.strip(",") for line in lines for word in line.split()}
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("verb", [*cli.VERBS[:-1], "data prepare"])
def test_help_breaks_no_line_early(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the source would, whose lines are wider than a terminal's."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([*verb.split(), "--help"])
    # Within a frame, which is of spaces here.
    framed = [line[2:-2] for line in capsys.readouterr().out.splitlines() if len(line) == 80]
    for line, following in itertools.pairwise(framed):
        column = len(following) - len(following.lstrip())
        if column and not line[:column].strip():
            # Lines are broken after spaces and commas.
            first = re.split("(?<=[, ])", following.lstrip())[0]
            assert len(f"{line.rstrip()} {first.rstrip()}") > 76, f"{line}\n{following}"


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_configs_and_say_how_to_run_them(name: str) -> None:
    path = PRESETS[name]
    config = read_config(path)
    assert isinstance(config.model, MODELS[config.architecture])
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert f"# Command: memspan train --preset {name}" in header
    assert re.search(r"\b(19|20)\d\d\b", header[0]), "the paper and its year"


def test_data_list_prints_every_corpus(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(printed(capsys, "data", "list", "--json"))
    assert rows == json.loads(json.dumps(list_corpora()))
    said = printed(capsys, "data", "list")
    assert {"two-plays", "wikitext-103"} < {row["name"] for row in rows if row["name"] in said}
    assert all(", ".join(row["splits"]) in said and row["state"] in said for row in rows)


def broken_output(kind: str) -> TextIO:
    """A standard output whose reader has gone, or on a full disk."""
    if kind == "closed pipe":
        reader, writer = os.pipe()
        os.close(reader)
        return open(writer, "w")
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    return open("/dev/full", "w")


@pytest.mark.parametrize(("kind", "status"), [("closed pipe", 0), ("full disk", 2)])
def test_output_that_fails_ends_no_training_and_other_verbs_tidily(
    kind: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", broken_output(kind))
    cli.main(["train", "--data.corpus", "text.txt", "--out", "run", *SMALL])
    sys.stdout.close()
    assert Path("run/checkpoints/step-00000006").is_dir()
    assert capsys.readouterr().err.count("training goes on") == 1
    for verb in (["generate", "run", "--tokens", "3", "--save-memory", "m"], ["data", "list"]):
        monkeypatch.setattr(sys, "stdout", broken_output(kind))
        with pytest.raises(SystemExit) as stop:
            cli.main(verb)
        assert stop.value.code == status
        sys.stdout.close()
    assert Path("m").exists()


def test_any_output_encoding_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", output)
    Path("text.txt").write_text("→☃ 日本" * 200, encoding="utf-8")
    characters = ["--data.tokenizer", "characters"]
    cli.main(["train", "--data.corpus", "text.txt", "--out", "run", *SMALL, *characters])
    cli.main(["generate", "run", "--prompt", "☃", "--tokens", "9"])
    assert rb"\u2603" in output.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.processes
def test_an_ascii_locale_names_the_characters_that_it_lacks(run: Path) -> None:
    """Arguments come as bytes behind surrogates there."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    line = [sys.executable, "-m", "memspan", "generate", "run", "--tokens", "2", "--prompt", "Café"]

    def said(*more: str) -> bytes:
        environment = os.environ | ascii_only
        return subprocess.run([*line, *more], env=environment, capture_output=True).stdout

    assert said().startswith(rb"Caf\xe9")
    assert json.loads(said("--json"))["prompt"] == "Café"


def test_reports_skipped_files_and_encodings(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each verb that reads a text reports them once, beside the result."""
    Path("folder").mkdir()
    Path("folder/a.txt").write_bytes(TEXT)
    Path("folder/empty.txt").touch()
    Path("folder/b.txt").write_bytes(TEXT.decode().encode("utf-16"))
    Path("latin.txt").write_bytes("déjà vu, ".encode("latin-1") * 400)
    cli.main(["data", "prepare", "folder"])
    said = capsys.readouterr().err
    assert "2 files are left out" in said
    assert "b.txt (UTF-16, not UTF-8)" in said
    for verb in (
        ["evaluate", "run", "--corpus", "latin.txt"],
        ["generate", "run", "--prompt-file", "latin.txt", "--tokens", "1"],
        ["train", "--data.corpus", "latin.txt", "--out", "latin", *SMALL],
    ):
        cli.main(verb)
        assert "".join(capsys.readouterr()).count("iconv -f CP1252") == 1


def test_a_note_goes_where_the_error_stream_is_at_that_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A live line of progress stands in for it, and prints notes above itself."""
    live = io.StringIO()

    def verb(arguments: list[str]) -> None:
        monkeypatch.setattr(sys, "stderr", live)
        logging.getLogger("memspan").warning("a note")

    monkeypatch.setattr(cli, "_dispatch", verb)
    cli.main(["measure"])
    assert live.getvalue() == "memspan: a note\n"
