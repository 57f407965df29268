"""Loops in C on several cores."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from memspan.native.library import refuse_without_memory

LEAST_WORK = 1 << 20
"""Multiplications of a thread at least: calling one costs some ten microseconds."""

_Body = ctypes.CFUNCTYPE(None, ctypes.py_object)


def in_shares(
    function: Callable[..., int], given: tuple[Any, ...], total: int, work: int, least: int = 1
) -> None:
    """Call ``function(*given, first, end)`` for the shares of ``range(total)``, at once, in as many
    threads as PyTorch may use. All threads have finished when this returns or raises: the caller may
    free its buffers.

    The threads are PyTorch's own. After its operations they wait for the next one without sleeping for
    some milliseconds, in which others would have to share the cores with them; ``waiting.py`` says when
    they do not.

    Args:
        function: one in C; it returns 0 if out of memory.
        given: its first arguments.
        total: the items, which do not depend on each other.
        work: multiplications in all.
        least: items of a share.

    Raises:
        MemspanError: there is not enough memory.
    """
    n_threads = min(torch.get_num_threads(), total // least, work // LEAST_WORK)
    if n_threads <= 1:
        refuse_without_memory(function(*given, ctypes.c_long(0), ctypes.c_long(total)))
        return
    edges = [ctypes.c_long(total * n // n_threads) for n in range(n_threads + 1)]
    # Threads take turns at calls: there may be fewer of them than shares. They run no Python code, in
    # which a signal's handler might be called: what it raises, as for Ctrl-C, would be lost there.
    calls = itertools.starmap(function, [(*given, *pair) for pair in itertools.pairwise(edges)])
    done: deque[int] = deque()
    process, parallel = _parallel()
    # A forked process has none of its parent's threads, and OpenMP would wait for them.
    if parallel is not None and process == os.getpid():
        parallel(_Body(done.extend), calls, n_threads, 0)
    done.extend(calls)
    assert len(done) == n_threads
    refuse_without_memory(all(done))


@functools.cache
def _parallel() -> tuple[int, Callable[..., None] | None]:
    """The process that asked first, and the function with which PyTorch's OpenMP runtime calls another
    in each of its threads; None where it has no such function, as on macOS."""
    try:
        function = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (OSError, AttributeError):
        return os.getpid(), None
    function.argtypes = [_Body, ctypes.py_object, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    parallel: Callable[..., None] = function
    return os.getpid(), parallel
