"""Tokens rolled back were never read."""

from __future__ import annotations

from collections.abc import Iterator

from statelaws.case import Case
from statelaws.laws.law import (
    ROWS,
    Compared,
    Law,
    length_of,
    state_after,
)
from statelaws.protocol import Claims
from statelaws.reading import Reading


def _back_cases(claims: Claims, seed: int) -> Iterator[Case]:
    tokens = length_of(claims)
    half = tokens // 2
    rest = tokens - tokens // 2
    counts = {1, 2, half // 2, half}
    for length in claims.lengths.values():
        counts |= {n for n in (length - 1, length, length + 1) if 0 < n <= half}
    for n in sorted(counts):
        for variant in ("read in a call", "read token by token", "read with what is kept"):
            if claims.anywhere or variant == "read in a call":
                yield Case(ROWS, (half, n, rest), variant)
        # Entries that are not overwritten at once must not be seen.
        yield Case(ROWS, (half, n, 1), "read in a call", extra=True)
    yield Case(ROWS, (1, 1, 2), "read in a call")


@Law("roll-back", "tokens rolled back were never read", _back_cases, ("truncate",))
def roll_back(reading: Reading, case: Case) -> Compared:
    kept, extra, _ = case.pieces
    if not kept or not extra:
        return Compared([])
    tail = reading.x[:, kept + extra :]
    calls = {"read in a call": [kept, extra], "read with what is kept": [kept + extra]}
    pieces = calls.get(case.variant, [kept, *[1] * extra])
    seen, _ = reading.read(tail, reading.state("truncate", state_after(reading, pieces), extra))
    expected, _ = reading.read(tail, state_after(reading, [kept]))
    return Compared([(expected, seen)])
