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
    PyTorch may use. None still runs when this returns or raises: the caller may free its buffers.

    Args:
        run: a function in C; it returns 0 if out of memory. What it raises in a thread is raised here.
        total: the items, which do not depend on each other.
        work: multiplications in all.

    Raises:
        MemspanError: there is not enough memory.
    """
    n_threads = max(1, min(torch.get_num_threads(), total, work // LEAST_WORK))
    edges = [total * n // n_threads for n in range(n_threads + 1)]
    done, raised = [0] * n_threads, []

    def share(n: int) -> None:
        done[n] = run(edges[n], edges[n + 1])

    def in_thread(n: int, finished: threading.Event) -> None:
        try:
            share(n)
        except BaseException as error:
            raised.append(error)
        finally:
            finished.set()

    started: list[threading.Event] = []
    try:
        for n in range(1, n_threads):
            finished = threading.Event()
            try:
                threading.Thread(target=in_thread, args=(n, finished)).start()
            except RuntimeError:
                # The system has no thread left: the caller's takes what remains.
                break
            started.append(finished)
        for n in [0, *range(len(started) + 1, n_threads)]:
            share(n)
    finally:
        _wait(started)
    if raised:
        raise raised[0]
    refuse_without_memory(all(done))


def _wait(events: list[threading.Event]) -> None:
    """Wait for all, even if the user interrupts that; the interrupt is raised afterwards."""
    # Not Thread.join: interrupted, it takes a thread that still runs for stopped, up to Python 3.12.
    interrupt = None
    for event in events:
        while not event.is_set():
            try:
                event.wait()
            except BaseException as error:
                interrupt = error
    if interrupt is not None:
        raise interrupt
