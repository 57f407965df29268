"""Arrays of token ids, as NumPy saves them (``.npy``), as text: a number of fixed width per line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from memspan.errors import MemspanError
from memspan.lab.data.options import MOST_TOKENS

WIDTH = len(str(MOST_TOKENS)) + 1
"""Bytes of an id: its digits, with zeros before them, and a line break."""
AT_ONCE = 1 << 16
"""Ids in memory at a time."""


def read_ids(path: Path, field: str) -> Iterator[bytes]:
    """The ids of a file as lines of decimal numbers.

    Raises:
        MemspanError: it is not an array of ids.
    """
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    # Damaged headers raise whatever they hold.
    except Exception as error:
        reason = str(error)[:200]
        raise MemspanError(
            f"{path} is not an array that numpy.save wrote ({reason}): save it again"
        ) from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise MemspanError(
            f"{path} holds {ids.dtype} {[*ids.shape]}, not ids: save one row of integers, as "
            "ids.reshape(-1).astype(numpy.uint16)"
        )
    for at in range(0, len(ids), AT_ONCE):
        part = ids[at : at + AT_ONCE]
        wrong = (part < 0) | (part >= MOST_TOKENS)
        if wrong.any():
            raise MemspanError(
                f"{path} has {part[wrong.argmax()]} at {at + int(wrong.argmax()):,}, which is not an "
                f"id: ids are 0 to {MOST_TOKENS - 1:,}"
            )
        yield "".join(f"{n:0{WIDTH - 1}d}\n" for n in part.tolist()).encode()
