"""How the command is spelled in messages, by how it was started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memspan import invocation

MODULE = str(Path(invocation.__file__).with_name("__main__.py"))


@pytest.fixture
def scripts(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the console script, which is not on the PATH."""
    folder = own_folders / "my scripts"
    folder.mkdir()
    (folder / "memspan").touch(0o755)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(folder))
    monkeypatch.setenv("PATH", str(own_folders / "nothing"))
    monkeypatch.delenv(invocation.PROGRAM, raising=False)
    return folder


def started(monkeypatch: pytest.MonkeyPatch, *as_typed: str) -> str:
    monkeypatch.setattr(sys, "argv", [MODULE if "-m" in as_typed else as_typed[0]])
    monkeypatch.setattr(sys, "orig_argv", list(as_typed))
    return invocation.command("evaluate", "a b")


def test_the_command_is_spelled_as_it_was_started(
    scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert started(monkeypatch, "my scripts/memspan") == "'my scripts/memspan' evaluate 'a b'"
    found = started(monkeypatch, ".venv/bin/python", "-m", "memspan")
    assert found == ".venv/bin/python -m memspan evaluate 'a b'"
    monkeypatch.setenv("PATH", str(scripts))
    assert started(monkeypatch, str(scripts / "memspan")) == "memspan evaluate 'a b'"
    # That on the PATH is another one.
    Path("memspan").touch(0o755)
    assert started(monkeypatch, "./memspan") == "./memspan evaluate 'a b'"


def test_python_code_and_launched_processes_name_what_is_installed(
    scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert started(monkeypatch, "train.py") == f"'{scripts}/memspan' evaluate 'a b'"
    (scripts / "memspan").unlink()
    assert started(monkeypatch, "train.py") == f"{sys.executable} -m memspan evaluate 'a b'"
    monkeypatch.setenv(invocation.PROGRAM, ".venv/bin/memspan")
    assert started(monkeypatch, "python", "-m", "memspan") == ".venv/bin/memspan evaluate 'a b'"
