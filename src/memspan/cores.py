"""Processor cores that this process may use, and how busy other programs keep them. No torch here."""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path

SPARE_CORES = 0.3
"""Use by other programs, in cores, that leaves the cores to this process."""
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def cores() -> int:
    """Cores that this process may use: those that it may run on or, in a container that has less CPU
    time, as many as that is worth."""
    available = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        available = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = _QUOTA.read_text().split()
        if quota != "max":
            available = min(available, max(1, math.ceil(int(quota) / int(period))))
    return available


class OtherPrograms:
    """Cores that other programs have used since this was made, or since it was last asked."""

    def __init__(self) -> None:
        self._before = _clocks()

    def seconds(self) -> float:
        """Seconds since then."""
        return 0.0 if self._before is None else time.monotonic() - self._before[2]

    def cores(self) -> float:
        """The mean number of cores that they used; 0 where the system does not say."""
        before = self._before
        self._before = _clocks()
        if before is None or self._before is None:
            return 0.0
        all_used, own, passed = (now - then for now, then in zip(self._before, before, strict=True))
        return max(0.0, all_used - own) / max(passed, 1e-3)


def _clocks() -> tuple[float, float, float] | None:
    """CPU seconds of all programs on the cores that this process may run on, those of this process,
    and the time; None where the system does not say."""
    try:
        names = {f"cpu{n}" for n in os.sched_getaffinity(0)}
        with open("/proc/stat") as file:
            lines = [line.split() for line in file if line.startswith("cpu")]
        # User, nice and system; interrupts, soft ones, and what a virtual machine's host has taken.
        ticks = [int(n) for line in lines if line[0] in names for n in (*line[1:4], *line[6:9])]
        second = os.sysconf("SC_CLK_TCK")
    except (AttributeError, OSError, ValueError):
        return None
    return (sum(ticks) / second, time.process_time(), time.monotonic()) if ticks else None
