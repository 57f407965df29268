"""Processor cores. No torch here: the command line asks before it imports torch."""

from __future__ import annotations

import os


def cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
