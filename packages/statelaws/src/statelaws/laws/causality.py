"""Outputs do not depend on later inputs."""

from __future__ import annotations

from statelaws.case import Case, join
from statelaws.laws.law import (
    Compared,
    Law,
    cases_of,
)
from statelaws.reading import Reading


@Law(
    "causality",
    "outputs do not depend on later inputs",
    cases_of(
        lambda half, rest: [
            (0, half, rest),
            (0, 1, 3),
            (0, half + rest - 1, 1),
            (half, 1, rest - 1),
            (half, rest - 1, 1),
            (half, rest // 2, rest - rest // 2),
        ]
    ),
)
def causality(reading: Reading, case: Case) -> Compared:
    before, kept, changed = case.pieces
    x = reading.x
    other = reading.other[: case.rows]
    inputs = join([x[:, : before + kept], other[:, before + kept :]])
    first, second = (
        reading.read_all(given, [before, kept + changed])[0][-1] for given in (x, inputs)
    )
    same = kept - reading.model.claims.looks_ahead
    if same < 1:
        return Compared([])
    return Compared(
        [(first[:, :same], second[:, :same])],
        [(first[:, kept:], second[:, kept:])],
        "later inputs hardly change later outputs",
    )
