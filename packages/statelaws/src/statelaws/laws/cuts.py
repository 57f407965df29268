"""Outputs do not depend on where a text is cut."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from statelaws.case import Case, join
from statelaws.laws.law import (
    LONG,
    ROWS,
    Compared,
    Law,
    length_of,
    outputs_of,
)
from statelaws.protocol import Claims
from statelaws.reading import Reading

_EMPTY = "no tokens in between"


def aligned(claims: Claims) -> list[tuple[int, ...]]:
    """Pieces with cuts at multiples of ``claims.cuts`` only."""
    n = claims.cuts
    tokens = length_of(claims)
    cuts = [[2], [1], [3], [1, 2], [1, 2, 3], range(1, -(-tokens // n))]
    return [
        tuple(stop - start for start, stop in pairwise([0, *(n * i for i in each), tokens]))
        for each in cuts
    ]


def _cut_cases(claims: Claims, seed: int) -> Iterator[Case]:
    if not claims.anywhere:
        yield from (Case(ROWS, pieces) for pieces in aligned(claims))
        return
    tokens = length_of(claims)
    half = tokens // 2
    yield Case(ROWS, (half, tokens - half))
    yield Case(ROWS, (1, tokens - 1))
    yield Case(ROWS, (tokens - 1, 1))
    yield Case(ROWS, (half, 1, 1, 2, tokens - half - 4))
    yield Case(ROWS, (1,) * tokens)
    sizes = {2, 3}
    for length in claims.lengths.values():
        sizes |= {length - 1, length, length + 1}
    for size in sorted(size for size in sizes if 1 < size < tokens):
        # Sixteen calls, if that is less than all, around the longest length.
        calls = min(tokens // size, 16)
        before = (tokens - calls * size) // 2 if calls == 16 else 0
        evenly = (before, *(size,) * calls, tokens - before - calls * size)
        yield Case(ROWS, tuple(filter(None, evenly)))
        if size != half:
            yield Case(ROWS, (size, tokens - size))
            rest = tokens - half - size
            yield Case(ROWS, (half, size, rest) if rest > 0 else (half, 1))
    # Some take another path for one row, or raise for several.
    for alone in ((half, tokens - half), (half, 1, 1, 2, tokens - half - 4)):
        yield Case(1, alone)
    generator = torch.Generator().manual_seed(seed)
    for most in (4, half):
        left = tokens
        pieces = []
        while left:
            pieces.append(min(left, 1 + int(torch.randint(most, (), generator=generator))))
            left -= pieces[-1]
        yield Case(ROWS, tuple(pieces))
    for empty in ((half, tokens - half), (half, 1, 2)):
        yield Case(ROWS, empty, _EMPTY, extra=True)
    if tokens < LONG:
        for long in ((LONG // 2, LONG - LONG // 2), (LONG - 2, 1, 1), (1,) * LONG):
            yield Case(ROWS, long, extra=True)


@Law(
    "cuts",
    "outputs do not depend on where a text is cut",
    _cut_cases,
    by_design=lambda m: None if m.claims.cuts else "outputs depend on the cuts, by design",
)
def cuts(reading: Reading, case: Case) -> Compared:
    whole = outputs_of(reading, reading.x, [case.tokens])
    if case.variant != _EMPTY:
        return Compared([(whole, outputs_of(reading, reading.x, case.pieces))])
    outputs = []
    state = reading.start()
    at = 0
    for piece in filter(None, case.pieces):
        if at:
            # Few models promise to read nothing.
            _, state = reading.read(reading.x[:, at:at], state)
        output, state = reading.read(reading.x[:, at : at + piece], state)
        outputs.append(output)
        at += piece
    return Compared([(whole, join(outputs))])
