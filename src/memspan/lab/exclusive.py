"""Refuses, in one line, simultaneous use of something by several threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from memspan.errors import MemspanError

_RANDOM_NUMBERS = threading.RLock()


@contextlib.contextmanager
def random_numbers() -> Iterator[None]:
    """Inside, this thread alone seeds PyTorch's random numbers and draws from them; they are the
    process's, and two that train at once would get weights that no seed gives back.

    Raises:
        MemspanError: another thread does so.
    """
    if not _RANDOM_NUMBERS.acquire(blocking=False):
        raise MemspanError(
            "another thread of this process trains or checks a model, and both would draw from the "
            "same random numbers: do it one after the other, or in a process of its own"
        )
    try:
        yield
    finally:
        _RANDOM_NUMBERS.release()
