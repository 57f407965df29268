"""A state reads on the same from a file."""

from __future__ import annotations

from statelaws.case import Case
from statelaws.laws.law import (
    Compared,
    Law,
    cases_of,
    plain_pieces,
    reusable_state,
    state_after,
)
from statelaws.reading import Reading


@Law("files", "a state reads on the same from a file", cases_of(plain_pieces), ("save",))
def files(reading: Reading, case: Case) -> Compared:
    *before, _ = case.pieces
    tail = reading.x[:, sum(before) :]
    expected, _ = reading.read(tail, state_after(reading, before))
    state = reusable_state(reading, before)
    loaded = reading.saved(state)
    seen, _ = reading.read(tail, loaded)
    after, _ = reading.read(tail, state)
    return Compared([(expected, seen), (expected, after)])
