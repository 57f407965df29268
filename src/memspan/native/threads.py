"""Loops in C on several cores."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import torch

from memspan.native import library

LEAST_WORK = 1 << 20
"""Multiplications of a thread at least: calling one costs some ten microseconds."""


def in_shares(function: Any, given: tuple[Any, ...], total: int, work: int, least: int = 1) -> None:
    """Call ``function(*given, first, end)`` for the shares of ``range(total)``, at once, in as many
    threads as PyTorch may use. All threads have finished when this returns or raises: the caller may
    free its buffers.

    The threads are PyTorch's own. After its operations they wait for the next one without sleeping for
    some milliseconds, in which others would have to share the cores with them; ``waiting.py`` says when
    they do not.

    Args:
        function: one in C; it returns 0 if out of memory.
        given: its first arguments, one pointer or two.
        total: the items, which do not depend on each other.
        work: multiplications in all.
        least: items of a share.

    Raises:
        MemspanError: there is not enough memory.
    """
    n_threads = min(torch.get_num_threads(), total // least, work // LEAST_WORK)
    shares = library.shares() if n_threads > 1 else None
    if shares is None:
        done = function(*given, ctypes.c_int64(0), ctypes.c_int64(total))
    else:
        one, two = (*given, None)[:2]
        done = shares.in_shares(parallel(), function, one, two, total, n_threads)
    library.refuse_without_memory(done)


def parallel() -> int | None:
    """The address of the function with which PyTorch's OpenMP runtime calls another in each of its
    threads; None where there is no such function, as on macOS, and in a forked process, which has none
    of its parent's threads: OpenMP would wait for them."""
    process, function = _parallel()
    return function if process == os.getpid() else None


@functools.cache
def _parallel() -> tuple[int, int | None]:
    """The process that asked first, and the function."""
    try:
        function = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (OSError, AttributeError):
        return os.getpid(), None
    return os.getpid(), ctypes.cast(function, ctypes.c_void_p).value
