"""Resident memory of this process, and whether it stays what it was."""

from __future__ import annotations

import os
from pathlib import Path

MIB = 2**20


def resident() -> int:
    """Bytes of memory that this process has in use (Linux)."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def growth(values: list[int], warm_up: int) -> float:
    """The last value over the one at index ``warm_up``, less one: 0.02 is 2 % more."""
    return values[-1] / values[warm_up] - 1
