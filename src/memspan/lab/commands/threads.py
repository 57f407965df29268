"""The option ``--threads``, and how many threads a verb uses without it."""

from __future__ import annotations

import logging
import os
import time
from typing import Annotated

import tyro

from memspan.cores import OtherPrograms, cores
from memspan.errors import counted

LOOK_SECONDS = 0.3
"""Time that shows how busy other programs are, at least; importing torch takes longer."""
DECIDED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables with which a user, or the launcher of several processes, decides."""

Threads = Annotated[
    int | None,
    tyro.conf.arg(
        help="Threads on the CPU (None: as many as other programs leave cores free at the start, or "
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
    """Set the number of PyTorch's threads; say which it is and why, unless the user has decided.

    Imports torch, and looks at what other programs do in that time.

    Args:
        given: the number that ``--threads`` gives.
        recorded: the number that the run to resume had.
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
        why = ", as the run had"
    elif most > 1:
        time.sleep(max(0.0, LOOK_SECONDS - others.seconds()))
        used = others.cores()
        n_threads = min(most, max(1, round(cores() - used)))
        if n_threads < most:
            why = f", since other programs use {used:.1f} of {cores()} cores"
    torch.set_num_threads(n_threads)
    return f"{counted(n_threads, 'thread')}{why} (--threads N decides)"


def announce(line: str | None) -> None:
    """Tell the user, apart from a verb's output."""
    if line is not None:
        logging.getLogger("memspan").warning(line)
