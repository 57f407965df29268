"""A window computed in training is what was computed step by step while acting."""

from __future__ import annotations

import torch

from statelaws.case import Case, join
from statelaws.errors import NotOfferedError
from statelaws.laws.law import Compared, Law, cases_of, state_after
from statelaws.reading import Reading

_GOES_ON = "no episode ends"
_ENDS = "episodes end in the window"
_REORDERED = "rows in another order"


@Law(
    "replay",
    "a window computed in training is what was computed while acting",
    cases_of(lambda half, rest: [(half, rest), (0, half), (1, 3)], (_GOES_ON, _ENDS, _REORDERED)),
    ("replay",),
)
def replay(reading: Reading, case: Case) -> Compared:
    if reading.model.claims.moves_in_training:
        raise NotOfferedError("training moves what it computes, by design")
    before, window = case.pieces
    x = reading.x[:, before:]
    starts = torch.zeros(case.rows, window, dtype=torch.bool)
    if case.variant == _ENDS:
        for row in range(case.rows):
            # In the middle, at the first step, at the last.
            starts[row, (window // 2, 0, window - 1)[row % 3]] = True
    state = state_after(reading, [1] * before)
    stored = reading.state("copy", state)
    acted = []
    for t in range(window):
        if starts[:, t].any():
            state = reading.state("reset", state, starts[:, t])
        output, state = reading.read(x[:, t : t + 1], state)
        acted.append(output)
    expected = join(acted)
    if case.variant == _REORDERED:
        back = list(reversed(range(case.rows)))
        stored = reading.state("select", stored, torch.tensor(back))
        expected = expected[back]
        x = x[back]
    module = reading.model.module
    module.train()
    reading.lines.append("module.train()")
    try:
        with torch.enable_grad():
            seen = reading.replayed(x, stored, starts)
    finally:
        module.eval()
    return Compared([(expected, seen)])
