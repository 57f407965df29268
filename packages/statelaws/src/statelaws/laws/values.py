"""Reading leaves states that were copied, or passed in, as they were."""

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

_VALUES = (
    "read the state twice",
    "read a copy, then the original",
    "read the original, then a copy",
    "outputs and inputs stay",
    "inputs are overwritten after the call",
)


@Law(
    "values",
    "reading leaves what was copied, or passed in, as it was",
    cases_of(plain_pieces, _VALUES),
)
def values(reading: Reading, case: Case) -> Compared:
    *before, last = case.pieces
    start = sum(before)
    consumed = reading.model.claims.consumes_state
    tail = reading.x[:, start:]
    other = reading.other[: case.rows, start:]
    if case.variant == _VALUES[3]:
        outputs, state = reading.read_all(reading.x, before)
        if not outputs:
            return Compared([])
        output = outputs[-1]
        kept = reading.given(output.value.clone(), f"{output.text}.clone()", "kept")
        inputs = reading.given(tail.value.clone(), f"{tail.text}.clone()", "inputs")
        reading.read(inputs, state, own=False)
        now = reading.given(output.value, output.text, "now")
        after = reading.given(inputs.value, inputs.text, "now")
        return Compared([(kept, now), (tail, after)])
    if case.variant == _VALUES[0] and consumed:
        return Compared([])
    expected, _ = reading.read(tail, state_after(reading, before))
    if case.variant == _VALUES[4]:
        state = reading.start()
        at = 0
        for piece in filter(None, before):
            part, new = (each[:, at : at + piece] for each in (reading.x, reading.other))
            inputs = reading.given(part.value.clone(), f"{part.text}.clone()", "inputs")
            _, state = reading.read(inputs, state, own=False)
            # As a stream's buffer, which the next inputs come in.
            new = new[: case.rows]
            reading.lines.append(f"{inputs.text}.copy_({new.text})")
            inputs.value.copy_(new.value)
            at += piece
        return Compared([(expected, reading.read(tail, state)[0])])
    state = reusable_state(reading, before)
    copy = state if case.variant == _VALUES[0] else reading.state("copy", state)
    used, again = (copy, state) if case.variant == _VALUES[1] else (state, copy)
    # Many models take different paths for one token and for many.
    _, later = reading.read(other[:, :1], used)
    if last > 1:
        reading.read(other[:, 1:], later)
        if not consumed:
            reading.read(other, used)
    return Compared([(expected, reading.read(tail, again)[0])])
