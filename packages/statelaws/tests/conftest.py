"""One thread, the same draws in every test, a folder of a test's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported: threads that wait for one another on few cores take most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """A test draws the same numbers alone, in another order and among other workers."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def gradients_stay_on() -> Iterator[None]:
    """Scripts of broken laws turn them off, and are run by tests."""
    yield
    assert torch.is_grad_enabled()


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder and a ``sys.path`` of the test's own."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    return tmp_path
