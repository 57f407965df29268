"""Memory of processes: what is resident, and the peak of a call."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import resource
from collections.abc import Callable
from pathlib import Path

import torch

MIB = 2**20


def resident() -> int:
    """Resident memory of this process in bytes (Linux)."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def growth(values: list[int], warm_up: int) -> float:
    """The relative change from the value at index ``warm_up`` to the last: 0.02 is 2 % more."""
    return values[-1] / values[warm_up] - 1


def peak_of(make: Callable[..., Callable[[], object]], *arguments: object) -> int:
    """Bytes that a call of what ``make`` returns takes beyond what is there, in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (make, *arguments))


def _peak(make: Callable[..., Callable[[], object]], *arguments: object) -> int:
    torch.set_num_threads(1)
    # Libraries loaded at the first backward pass and step do not count.
    x = torch.nn.Linear(8, 8)
    torch.nn.functional.cross_entropy(x(torch.ones(1, 8)), torch.zeros(1).long()).backward()
    torch.optim.AdamW(x.parameters(), fused=True).step()
    call = make(*arguments)
    reset_peak()
    before = peak_bytes()
    call()
    return peak_bytes() - before


def reset_peak() -> None:
    """Linux: forget the peak that imports may have caused."""
    gc.collect()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The process's largest resident size.

    Not Linux's ``ru_maxrss``: after fork and exec that starts with the parent's.
    """
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
