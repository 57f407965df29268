"""The option ``--threads``, and the number of threads without it."""

from __future__ import annotations

import logging
import os
import time
from typing import Annotated

import tyro

from memspan.cores import OtherPrograms, cores
from memspan.errors import counted

LOOK_SECONDS = 0.3
"""Minimum time to observe how busy other programs are; importing torch takes longer."""
DECIDED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables by which a user, or the launcher of several processes, sets the number."""

Threads = Annotated[
    int | None,
    tyro.conf.arg(
        help="Threads on the CPU (None: one for each core that is free at the start, or "
        "OMP_NUM_THREADS)."
    ),
]
OneThread = Annotated[
    int | None,
    tyro.conf.arg(
        help="Threads on the CPU (None: 1, so that none of the budget is spent on waiting, or "
        "OMP_NUM_THREADS)."
    ),
]


def set_threads(given: int | None, recorded: int | None = None, *, one: bool = False) -> str | None:
    """Set the number of PyTorch's threads; return a line about it, or None if the user has set it.

    Imports torch, and observes in the meantime how busy other programs are.

    Args:
        given: the number that ``--threads`` gives.
        recorded: the number with which the run to resume was trained.
        one: use one thread.
    """
    others = OtherPrograms()
    import torch

    if given is not None:
        torch.set_num_threads(given)
    if given is not None or any(map(os.environ.get, DECIDED)):
        return None
    most = min(torch.get_num_threads(), cores())
    n_threads = most
    why = ""
    if one:
        n_threads = 1
        why = ", so that no CPU time is spent waiting"
    elif recorded is not None and recorded <= most:
        n_threads = recorded
        why = ", as in the run so far"
    elif most > 1:
        time.sleep(max(0.0, LOOK_SECONDS - others.seconds()))
        used = others.cores()
        n_threads = min(most, max(1, round(cores() - used)))
        if n_threads < most:
            why = f", since other programs use {used:.1f} of {cores()} cores"
    torch.set_num_threads(n_threads)
    return f"{counted(n_threads, 'thread')}{why} (--threads N decides)"


def announce(line: str | None) -> None:
    """Print a line on standard error, apart from a verb's output."""
    if line is not None:
        logging.getLogger("memspan").warning(line)
