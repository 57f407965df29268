"""Loops in C on several cores."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from memspan.ops.native.compiler import refuse_without_memory

LEAST_WORK = 1 << 20
"""Multiplications of a thread at least: starting one costs about 50 microseconds."""


def in_shares(run: Callable[[int, int], int], total: int, work: int) -> None:
    """Call ``run(first, end)`` for the shares of ``range(total)``, at once, in as many threads as
    PyTorch may use.

    Args:
        run: a function in C; it returns 0 if out of memory.
        total: the items, which do not depend on each other.
        work: multiplications in all.

    Raises:
        MemspanError: there is not enough memory.
    """
    n_threads = max(1, min(torch.get_num_threads(), total, work // LEAST_WORK))
    edges = [total * n // n_threads for n in range(n_threads + 1)]
    done = [0] * n_threads

    def share(n: int) -> None:
        done[n] = run(edges[n], edges[n + 1])

    threads = [threading.Thread(target=share, args=(n,)) for n in range(1, n_threads)]
    for thread in threads:
        thread.start()
    share(0)
    for thread in threads:
        thread.join()
    refuse_without_memory(all(done))
