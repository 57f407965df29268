"""Output on a terminal of 80 columns: no line ends within a word."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import SMALL
from memspan.lab import cli
from memspan.lab.invocation import command
from memspan.lab.printing import quoted, wrapped

COLUMNS = 80
CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@contextlib.contextmanager
def terminal(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """A pseudo-terminal as standard output and error, whose lines are looked at once it is closed."""
    ours, theirs = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        # Until the last writer has gone.
        with contextlib.suppress(OSError):
            while data := os.read(ours, 65536):
                shown.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    with patch.context() as inside, open(theirs, "w") as stream:
        inside.setenv("COLUMNS", str(COLUMNS))
        inside.setenv("TERM", "xterm")
        inside.setattr(sys, "stdout", stream)
        inside.setattr(sys, "stderr", stream)
        with contextlib.suppress(SystemExit):
            yield
    reader.join()
    os.close(ours)
    lines = CONTROLS.sub("", b"".join(shown).decode()).split("\n")
    # A line of progress is written over.
    last = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
    assert "".join(last).strip()
    assert not [line for line in last if len(line) > COLUMNS and " " in line.strip()]
    assert not [line for line in last if "\u2501" in line and "memspan:" in line]


@pytest.mark.parametrize("verb", ["", *cli.VERBS, "data prepare", "data list"])
def test_help_fits_a_terminal(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    with terminal(monkeypatch):
        cli.main([*verb.split(), "--help"])


@pytest.mark.usefixtures("text_file")
def test_a_new_run_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch):
        cli.main(["train", *SMALL, "--out", "a-folder-with-quite-a-long-name"])


@pytest.mark.usefixtures("text_file", "models")
@pytest.mark.parametrize(
    "line",
    [
        "evaluate run --corpus text.txt",
        "generate run --tokens 3 --prompt x --save-memory memory-of-a-name-that-is-rather-long",
        "measure run --budget 0.5 --longest 16 --out a-folder-that-is-not-there/and/another-in-it",
        "data list",
        "check models.py:forgets --laws cuts,rows --budget 1",
        "evaluate nowhere",
        "generate run --tempratur 3",
        "learn",
    ],
)
def test_results_fit_a_terminal(monkeypatch: pytest.MonkeyPatch, run: Path, line: str) -> None:
    with terminal(monkeypatch):
        cli.main(line.split())


def test_lines_break_between_words() -> None:
    assert wrapped("  one two three\nfour", 20) == "  one two three\nfour"
    assert wrapped("  one two three four five", 20) == "  one two three four\n    five"
    assert wrapped("one " * 6 + "two", 20) == "one one one one one\none two"
    assert wrapped("x" * 30, 20) == "x" * 30


def test_commands_break_as_a_shell_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSPAN_PROGRAM", "memspan")
    words = ["generate", "runs/a-long-name", "--prompt", "two words", "--min-p", 0.1]
    assert command(*words, columns=80) == command(*words)
    assert command(*words, columns=50) == (
        "memspan generate runs/a-long-name --prompt \\\n    'two words' --min-p 0.1"
    )


def test_a_models_text_cannot_steer_the_terminal() -> None:
    assert quoted("\none\x1b[2J\ntwo\n") == "  | one\ufffd[2J\n  | two"
