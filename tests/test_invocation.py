"""Spelling of the command in messages, by how it was started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import memspan
from memspan.lab import invocation

MODULE = str(Path(memspan.__file__).with_name("__main__.py"))
INSTALLED = "my scripts/memspan"


@pytest.fixture(autouse=True)
def scripts(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The console script, in a folder that is not on the PATH, and another program of its name."""
    Path("my scripts").mkdir()
    for name in (INSTALLED, "memspan"):
        Path(name).touch(0o755)
    monkeypatch.setattr("sysconfig.get_path", lambda _: "my scripts")
    monkeypatch.setenv("PATH", "nothing")
    monkeypatch.delenv(invocation.PROGRAM, raising=False)


def started(monkeypatch: pytest.MonkeyPatch, *as_typed: str) -> str:
    monkeypatch.setattr(sys, "argv", [MODULE if "-m" in as_typed else as_typed[0]])
    monkeypatch.setattr(sys, "orig_argv", list(as_typed))
    return invocation.command("evaluate", "a b").removesuffix(" evaluate 'a b'")


def test_the_command_is_spelled_as_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(monkeypatch, INSTALLED) == f"'{INSTALLED}'"
    python = ".venv/bin/python", "-m", "memspan"
    assert started(monkeypatch, *python) == ".venv/bin/python -m memspan"
    monkeypatch.setenv("PATH", "my scripts")
    assert started(monkeypatch, INSTALLED) == "memspan"
    assert started(monkeypatch, "./memspan") == "./memspan"
    # Of a launched process, how the launcher was started.
    monkeypatch.setenv(invocation.PROGRAM, ".venv/bin/memspan")
    assert started(monkeypatch, *python) == ".venv/bin/memspan"


def test_python_code_names_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(monkeypatch, "train.py") == f"'{INSTALLED}'"
    Path(INSTALLED).unlink()
    assert started(monkeypatch, "train.py") == f"{sys.executable} -m memspan"
