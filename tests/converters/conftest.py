from __future__ import annotations

from pathlib import Path

import pytest

from transfo_xl_folder import OPTIONS, random_tensors, write


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small checkpoint."""
    return write(tmp_path / "source", OPTIONS, random_tensors(OPTIONS))
