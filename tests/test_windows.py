"""Windows, by taking away what it lacks: nobody has run memspan there yet."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import memspan
from command_line import refused
from memspan.files import disk
from memspan.lab.training import start
from tiny_runs import OPTIONS

MISSING = (
    "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "fork", "geteuid", "getuid", "killpg",
    "pread", "sched_getaffinity", "sysconf", "sysconf_names",
)  # fmt: skip
original = os.open


def _open(path: Any, flags: int, mode: int = 0o777) -> int:
    """``os.open`` as it is there."""
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", str(path))
    return original(path, flags, mode)


@pytest.fixture(autouse=True)
def windows(tiny_text: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USERNAME", "me")
    for name in MISSING:
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(os, "open", _open)
    # The library's own way, chosen when it was imported.
    monkeypatch.setattr(shutil, "_use_fd_functions", False)
    monkeypatch.setattr(disk, "FOLDERS_OPEN", False)
    monkeypatch.setattr(disk, "LOCKS", False)
    monkeypatch.setattr(disk, "fcntl", None)


def test_training_scoring_and_going_on_work() -> None:
    start.train(OPTIONS, Path("r"))
    assert memspan.evaluate("r").tokens
    assert memspan.generate("r", "memory ", tokens=3).text
    shutil.rmtree("r/checkpoints/step-00000006")
    start.resume(Path("r"))
    start.train(OPTIONS, Path("whole"))
    assert memspan.load("r").model.fingerprint() == memspan.load("whole").model.fingerprint()


def test_several_processes_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    said = refused(capsys, "train", "--data.corpus", "text.txt", "--nproc", "2")
    assert "--nproc needs Linux or macOS" in said
