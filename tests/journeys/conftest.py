"""Runs that are made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from twins import make

from memspan.lab.training import metrics


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def made(name: str, runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run of that name: made by the first test that takes it, and changed by none."""
    with monkeypatch.context() as patch:
        patch.setenv("MEMSPAN_CACHE", str(runs / "cache"))
        patch.setattr(metrics, "plot", lambda *_: [])
        patch.chdir(runs)
        return make(name, runs)
