"""Rows that cover every pair of values: most faults need two things to meet, few need three."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

Row = tuple[str, ...]
Pair = tuple[int, str, int, str]
"""Two axes and a value on each."""


def pairs_of(row: Row) -> set[Pair]:
    """What one row covers."""
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}


def covering(rows: Sequence[Row], wanted: Iterable[Pair] | None = None) -> list[Row]:
    """The fewest of ``rows`` that greed finds in which each pair occurs; the same ones every time.

    ``wanted``: only these pairs (None: all that occur in ``rows``).
    """
    pairs = {row: pairs_of(row) for row in rows}
    missing = set(wanted) if wanted is not None else set().union(*pairs.values())
    chosen = []
    while missing:
        # max takes the first of equals.
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        if not pairs[best] & missing:
            raise ValueError(f"no row has {min(missing)}")
        chosen.append(best)
        missing -= pairs[best]
    return chosen
