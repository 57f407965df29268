"""A text, and a run that was trained on it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from command_line import SMALL, TEXT
from memspan import cli
from memspan.training import metrics


@pytest.fixture
def text_file(own_folders: Path) -> None:
    Path("text.txt").write_bytes(TEXT)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is trained once, for all tests to copy."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMSPAN_CACHE", str(folder / "cache"))
        patch.setattr(metrics, "plot", lambda *_: [])
        patch.chdir(folder)
        Path("text.txt").write_bytes(TEXT)
        cli.main(["train", "--data.corpus", "text.txt", "--out", "run", *SMALL])
    return folder / "run"


@pytest.fixture
def run(text_file: None, trained: Path) -> Path:
    shutil.copytree(trained, "run")
    return Path("run")
