"""Memory of processes: resident, peaks, and what training takes beyond the model itself.

python benchmarks/peak_memory.py transformer-xl labml S float32     # a side, in a process of its own
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import subprocess
import sys
from pathlib import Path

import torch

from peers.registry import SIZES, side_class
from works import at, prepared

MIB = 2**20


def resident() -> int:
    """Resident memory of this process in bytes (Linux)."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def growth(values: list[int], warm_up: int) -> float:
    """The relative change from the value at index ``warm_up`` to the last: 0.02 is 2 % more."""
    return values[-1] / values[warm_up] - 1


def peak_megabytes(architecture: str, name: str, size: str, precision: str) -> float:
    """What training takes, in a fresh process."""
    command = [sys.executable, __file__, architecture, name, size, precision]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(said.split()[-1])


def report(architecture: str, name: str, size: str, precision: str) -> None:
    """What the process says that :func:`peak_megabytes` starts."""
    torch.set_num_threads(1)
    side = side_class(architecture, name)(SIZES[architecture][size])
    # Libraries loaded at the first backward pass and step do not count.
    x = torch.nn.Linear(8, 8)
    torch.nn.functional.cross_entropy(x(torch.ones(1, 8)), torch.zeros(1).long()).backward()
    torch.optim.AdamW(x.parameters(), fused=True).step()
    reset_peak()
    before = peak_bytes()
    with at(precision, "train"):
        call = prepared(side, "train", precision)
        for _ in range(3):
            call()
    print((peak_bytes() - before) / MIB)


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


if __name__ == "__main__":
    report(*sys.argv[1:])
