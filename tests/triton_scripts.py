"""Scripts that prove Triton programs, run in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="needs Triton: pip install triton"
)


def proven(script: str, *arguments: str, interpret: bool) -> list[dict[str, Any]]:
    """The lines that ``script`` of the folder benchmarks prints."""
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpret))}
    command = [sys.executable, f"benchmarks/{script}.py", *arguments]
    ran = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return [json.loads(line) for line in ran.stdout.splitlines()]
