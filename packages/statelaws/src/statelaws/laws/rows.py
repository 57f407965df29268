"""A row's outputs do not depend on other rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from statelaws.case import Case, Named, join
from statelaws.laws.law import (
    MANY_ROWS,
    ROWS,
    Compared,
    Law,
    cases_of,
    length_of,
    outputs_of,
    plain_pieces,
    state_after,
)
from statelaws.protocol import Claims
from statelaws.reading import Reading

_SELECTED: dict[str, Callable[[int], list[int]]] = {
    "select the rows in reverse": lambda rows: list(reversed(range(rows))),
    "select every row twice": lambda rows: [row for row in range(rows) for _ in range(2)],
    "select the last row": lambda rows: [rows - 1],
    "select all but the first row": lambda rows: list(range(1, rows)),
}
_NEIGHBOURS = ("each row alone", "rows in reverse", "other neighbours", "two rows more")
_FEW = "the first and the last rows alone"


def _rows_cases(claims: Claims, seed: int) -> Iterator[Case]:
    yield from cases_of(plain_pieces, (*_NEIGHBOURS, *_SELECTED))(claims, seed)
    for draw in (1, 2, 3):
        # A token may have a meaning of its own, such as the beginning of a text.
        half = length_of(claims) // 2
        rest = length_of(claims) - length_of(claims) // 2
        yield Case(ROWS, (half // 2, half - half // 2, rest), _NEIGHBOURS[2], draw, extra=True)
    yield Case(MANY_ROWS, (2, 1, 3), _FEW, extra=True)


def _remark(case: Case) -> tuple[Case, str]:
    variant = _NEIGHBOURS[0] if case.variant in _SELECTED else case.variant
    return replace(case, variant=variant, pieces=(0, 0, case.tokens)), (
        "also in one call from an empty state, so not by the state: such are experts with room for so "
        "many tokens of a batch, and normalisation over it; where that is meant, claim rows=False"
    )


@Law(
    "rows",
    "a row's outputs do not depend on other rows",
    _rows_cases,
    by_design=lambda m: None if m.claims.rows else "a row's outputs depend on others, by design",
    remark=_remark,
)
def rows(reading: Reading, case: Case) -> Compared:
    *before, last = case.pieces
    x = reading.x
    other = reading.other
    if case.variant in _SELECTED:
        rows = _SELECTED[case.variant](case.rows)
        # Copies of a row read on differently.
        several = other if len(rows) <= len(other.value) else join([other, other], 0)
        tail = several[: len(rows), case.tokens - last :]
        expected, _ = reading.read(tail, state_after(reading, before, x[rows]))
        selected = reading.state("select", state_after(reading, before), torch.tensor(rows))
        return Compared([(expected, reading.read(tail, selected)[0])])
    expected = outputs_of(reading, x, case.pieces)
    most = case.rows - 1
    every = slice(None)
    back = list(reversed(range(case.rows)))
    # The inputs read instead, and the rows of expected and of actual outputs that must be equal.
    read: dict[str, list[tuple[Named, Any, Any]]] = {
        "each row alone": [(x[i : i + 1], slice(i, i + 1), every) for i in range(case.rows)],
        "rows in reverse": [(x[back], back, every)],
        "other neighbours": [
            (join([x[:1], other[1 : case.rows]], 0), slice(1), slice(1)),
            (join([other[:most], x[most:]], 0), slice(most, None), slice(most, None)),
        ],
        "two rows more": [(join([x, other[:2]], 0), every, slice(case.rows))],
        _FEW: [(x[:2], slice(2), every), (x[-2:], slice(-2, None), every)],
    }
    return Compared(
        [
            (expected[own], outputs_of(reading, inputs, case.pieces)[seen])
            for inputs, own, seen in read[case.variant]
        ]
    )
