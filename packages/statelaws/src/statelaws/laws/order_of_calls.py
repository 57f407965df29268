"""Other calls in between change nothing."""

from __future__ import annotations

import torch

from statelaws.case import Case, join
from statelaws.errors import NotOfferedError
from statelaws.laws.law import (
    Compared,
    Law,
    cases_of,
    outputs_of,
    reusable_state,
)
from statelaws.reading import Reading

_BETWEEN = ("other streams between", "training between", "gradients recorded")


@Law(
    "order-of-calls",
    "other calls in between change nothing",
    cases_of(lambda half, rest: [(half, rest), (half, 1)], _BETWEEN),
)
def order_of_calls(reading: Reading, case: Case) -> Compared:
    expected = outputs_of(reading, reading.x, case.pieces)
    if case.variant == _BETWEEN[2]:
        reading.lines.append("torch.set_grad_enabled(True)")
        with torch.enable_grad():
            return Compared([(expected, outputs_of(reading, reading.x, case.pieces))])
    training = case.variant == _BETWEEN[1]
    module = reading.model.module
    if training and reading.model.claims.moves_in_training:
        raise NotOfferedError("training moves what it computes, by design")
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    state = reusable_state(reading, [])
    outputs = []
    at = 0
    try:
        for piece in case.pieces:
            if training:
                module.train()
                reading.lines.append("module.train()")
            with torch.set_grad_enabled(training):
                _, other = reading.read(reading.other, reading.start(case.rows + 2))
                reading.read(reading.other[: case.rows], reading.start())
                reading.read(reading.other[:, :1], other)
            if training:
                module.eval()
                reading.lines.append("module.eval()")
            output, state = reading.read(reading.x[:, at : at + piece], state)
            outputs.append(output)
            at += piece
    finally:
        # Other cases are not to see what training moved.
        module.eval()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    return Compared([(expected, join(outputs))])
