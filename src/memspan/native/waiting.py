"""Short waits of PyTorch's threads for one another, while other programs use the cores."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator

import torch

from memspan.cores import SPARE_CORES, OtherPrograms, cores

LOOK_SECONDS = 0.25
"""Time between two looks at the use of the cores."""
DECIDED = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Environment variables with which a user decides how threads wait."""


@contextlib.contextmanager
def sharing_cores() -> Iterator[None]:
    """Inside, PyTorch's threads wait for one another without spinning while other programs use the
    cores.

    Otherwise a thread that waits keeps a core busy for milliseconds, and the thread that it waits for
    may be without one. GNU OpenMP spins for a microsecond only if it has more threads than there are
    cores: a thread of ours has it make some more, which stay asleep, for as long as others are busy.
    The same threads go on computing the same shares, so no result depends on it.

    Nothing is done with one thread, where the user has decided, and with another OpenMP runtime.
    """
    openmp = _gnu_openmp()
    n_threads = torch.get_num_threads()
    if openmp is None or n_threads == 1 or any(map(os.environ.get, DECIDED)):
        yield
        return
    end = threading.Event()
    given = openmp, n_threads, end
    watch = threading.Thread(target=_watch, args=given, daemon=True, name="memspan-cores")
    watch.start()
    try:
        yield
    finally:
        end.set()
        watch.join()


def _watch(openmp: ctypes.CDLL, n_threads: int, end: threading.Event) -> None:
    """Keep more threads than cores while others are busy, and at first, before that is known."""
    others = OtherPrograms()
    idle = _more_threads_than_cores(openmp)
    while not end.wait(LOOK_SECONDS):
        if n_threads + others.cores() <= cores() + SPARE_CORES:
            idle.set()
        elif idle.is_set():
            idle = _more_threads_than_cores(openmp)
    idle.set()


def _more_threads_than_cores(openmp: ctypes.CDLL) -> threading.Event:
    """Make OpenMP have more threads than there are cores until the event is set."""
    made = threading.Event()
    idle = threading.Event()
    # Any function in C will do. The runtime keeps a caller's threads for as long as the caller lives.
    function = ctypes.cast(openmp.omp_get_thread_num, ctypes.c_void_p)
    number = ctypes.c_uint((os.cpu_count() or 1) + 1)

    def keep() -> None:
        openmp.GOMP_parallel(function, None, number, ctypes.c_uint(0))
        made.set()
        idle.wait()

    threading.Thread(target=keep, daemon=True, name="memspan-asleep").start()
    made.wait()
    return idle


def _gnu_openmp() -> ctypes.CDLL | None:
    """PyTorch's OpenMP runtime, if it is GNU's."""
    try:
        runtime = ctypes.CDLL(torch._C.__file__)
    except OSError:
        return None
    # Intel's and LLVM's have all of GNU's functions, and more.
    is_gnu = hasattr(runtime, "GOMP_parallel") and not hasattr(runtime, "kmp_get_blocktime")
    return runtime if is_gnu else None
