"""The same call twice gives the same outputs."""

from __future__ import annotations

from statelaws.case import Case
from statelaws.laws.law import (
    Compared,
    Law,
    cases_of,
    outputs_of,
)
from statelaws.reading import Reading


@Law(
    "repeatable",
    "the same call twice gives the same outputs",
    cases_of(lambda half, rest: [(half + rest,), (half, rest), (half, 1, 1), (1,), (1, 2)]),
)
def repeatable(reading: Reading, case: Case) -> Compared:
    first, second = (outputs_of(reading, reading.x, case.pieces) for _ in range(2))
    return Compared([(first, second)], [])
