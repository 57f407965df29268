"""Resident memory of this process, and how it changes."""

from __future__ import annotations

import os
from pathlib import Path

MIB = 2**20


def resident() -> int:
    """Resident memory of this process in bytes (Linux)."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def growth(values: list[int], warm_up: int) -> float:
    """The relative change from the value at index ``warm_up`` to the last: 0.02 is 2 % more."""
    return values[-1] / values[warm_up] - 1
