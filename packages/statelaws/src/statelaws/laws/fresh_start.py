"""A reset row and a packed document begin as from an empty state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise

import torch

from statelaws.case import Case, join
from statelaws.laws.law import (
    Compared,
    Law,
    cases_of,
    plain_pieces,
    state_after,
)
from statelaws.protocol import Claims
from statelaws.reading import Reading

_RESET: dict[str, Callable[[int], list[bool]]] = {
    "reset the first row": lambda rows: [row == 0 for row in range(rows)],
    "reset the last row": lambda rows: [row == rows - 1 for row in range(rows)],
    "reset all but the first row": lambda rows: [row > 0 for row in range(rows)],
    "reset all rows": lambda rows: [True] * rows,
}
_PACKED = "documents in one call"
_LAID = "documents laid end to end"


def _fresh_cases(claims: Claims, seed: int) -> Iterator[Case]:
    yield from cases_of(plain_pieces, _RESET)(claims, seed)
    packed = cases_of(
        lambda half, rest: [(0, half, rest), (half, rest - 1, 1), (1, 3, 2)], [_PACKED, _LAID]
    )
    yield from packed(claims, seed)


@Law(
    "fresh-start",
    "a reset row and a packed document begin as from an empty state",
    _fresh_cases,
    ("reset", "read_packed", "read_varlen"),
)
def fresh_start(reading: Reading, case: Case) -> Compared:
    if case.variant == _PACKED:
        return _packed(reading, case)
    if case.variant == _LAID:
        return _laid(reading, case)
    *before, _ = case.pieces
    tail = reading.x[:, sum(before) :]
    rows = _RESET[case.variant](case.rows)
    reset = reading.state("reset", state_after(reading, before), torch.tensor(rows))
    seen, _ = reading.read(tail, reset)
    fresh, _ = reading.read(tail, reading.start())
    new, old = ([i for i, reset in enumerate(rows) if reset == each] for each in (True, False))
    pairs = [(fresh[new], seen[new])]
    if old:
        on, _ = reading.read(tail, state_after(reading, before))
        pairs.append((on[old], seen[old]))
    return Compared(pairs)


def _packed(reading: Reading, case: Case) -> Compared:
    before, packed, after = case.pieces
    x = reading.x
    end = before + packed
    if not packed:
        return Compared([])
    starts = torch.zeros(case.rows, packed, dtype=torch.bool)
    # In the middle; at the beginning and at the end; two, one after the other.
    at = [[packed // 2], [0, packed - 1], [packed // 3, packed // 3 + 1]]
    for row in range(case.rows):
        for position in at[row % len(at)]:
            starts[row, min(position, packed - 1)] = True
    state = state_after(reading, [before])
    output, state = reading.outputs("read_packed", x[:, before:end], state, starts)
    last, _ = reading.read(x[:, end:], state)
    pairs = []
    for row in range(case.rows):
        edges = [0, *starts[row].nonzero().flatten().tolist(), packed]
        for first, stop in pairwise(edges):
            if first == stop:
                continue
            # Tokens before the first start belong to the previous call's document.
            prefix = 0 if starts[row, first] else before
            pieces = [prefix, stop - first, after if stop == packed else 0]
            inputs = x[:, before + first - prefix :]
            outputs, _ = reading.read_all(inputs, pieces)
            outputs = outputs[prefix > 0 :]
            pairs.append((outputs[0][row], output[row, first:stop]))
            if stop == packed and after:
                pairs.append((outputs[1][row], last[row]))
    return Compared(pairs)


def _laid(reading: Reading, case: Case) -> Compared:
    before, most, after = case.pieces
    # Few models do; the law is about resets and packed documents as well.
    if not most or getattr(reading.model, "read_varlen", None) is None:
        return Compared([])
    x = reading.x
    end = before + most
    lengths = [(most, 1, (most + 1) // 2)[row % 3] for row in range(case.rows)]
    edges = [0, *accumulate(lengths)]
    flat = join([x[i : i + 1, before : before + n] for i, n in enumerate(lengths)])
    state = state_after(reading, [before])
    output, state = reading.outputs("read_varlen", flat, state, torch.tensor(edges))
    last = reading.read(x[:, end:], state)[0] if after else None
    pairs = []
    for row, length in enumerate(lengths):
        part = x[:, before : before + length]
        alone, own = reading.read(part, state_after(reading, [before]))
        pairs.append((alone[row], output[0, edges[row] : edges[row + 1]]))
        if last is not None:
            pairs.append((reading.read(x[:, end:], own)[0][row], last[row]))
    return Compared(pairs)
