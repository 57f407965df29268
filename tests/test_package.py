"""The package's own face: what it shows, and that showing it costs nothing."""

from __future__ import annotations

import subprocess
import sys

import memspan


def test_dir_shows_what_is_public() -> None:
    assert set(memspan.__all__) <= set(dir(memspan))
    assert {"LanguageModel", "Memory", "MemspanError", "Run", "load"} <= set(memspan.__all__)
    assert all(getattr(memspan, name) is not None for name in dir(memspan))


def test_dir_does_not_import_torch() -> None:
    program = "import memspan, sys; dir(memspan); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
