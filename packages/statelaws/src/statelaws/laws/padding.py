"""Padding on one side changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch

from statelaws.case import Case, written
from statelaws.laws.law import (
    ROWS,
    Compared,
    Law,
    length_of,
    state_after,
)
from statelaws.protocol import Claims, Stateful
from statelaws.reading import Reading


def _padding_law(side: Literal["right", "left"]) -> Law:
    def cases(claims: Claims, seed: int) -> Iterator[Case]:
        tokens = length_of(claims)
        half = tokens // 2
        rest = tokens - tokens // 2
        for fill in ("zeros as padding", "other inputs as padding"):
            for pieces in ((0, half, rest), (0, 3, 1), (half, rest - 1, 1), (half, 3, 2)):
                if side == "right" or not pieces[0] or "left-continued" in claims.padding:
                    yield Case(ROWS, pieces, fill)
            # Some leave the mask out if there is one row.
            yield Case(1, (0, half, rest), fill)

    def by_design(model: Stateful[Any]) -> str | None:
        if {side, f"{side}-last"} & model.claims.padding:
            return None
        return f"it does not promise to ignore padding on the {side}"

    says = f"padding on the {side} changes nothing"

    @Law(f"padding-{side}", says, cases, ("read_padded",), by_design)
    def padded(reading: Reading, case: Case) -> Compared:
        before, padded, after = case.pieces
        x = reading.x
        end = before + padded
        if not padded:
            return Compared([])
        # A full row, one of a single token, and one between: in one order sorting them by length
        # moves each to another's place, in the other from the longest to the shortest.
        several = [padded, 1, (padded + 1) // 2]
        several = several if case.variant.startswith("zeros") else several[::-1]
        lengths = torch.tensor(several * case.rows)[: case.rows]
        if case.rows == 1:
            lengths = torch.tensor([(padded + 1) // 2])
        position = torch.arange(padded).expand(case.rows, padded)
        position = position if side == "right" else position.flip(1)
        real = position < lengths[:, None]
        part = x[:, before:end]
        other = reading.other[: case.rows, before:end]
        mask = real.reshape(*real.shape, *[1] * (part.value.dim() - 2)).to(part.value.device)
        zeros = case.variant.startswith("zeros")
        fill = torch.zeros_like(other.value) if zeros else other.value
        text = f"torch.where({written(mask)}, {part.text}, {'0' if zeros else other.text})"
        inputs = reading.given(torch.where(mask, part.value, fill), text, "padded")
        state = state_after(reading, [before])
        output, state = reading.outputs("read_padded", inputs, state, lengths, side)
        last, _ = reading.read(x[:, end:], state)
        pairs = []
        for row, length in enumerate(lengths.tolist()):
            first = before if side == "right" else end - length
            alone, state = reading.read(
                x[:, first : first + length], state_after(reading, [before])
            )
            offset = first - before
            pairs.append((alone[row], output[row, offset : offset + length]))
            if after and (side == "left" or "right" in reading.model.claims.padding):
                pairs.append((reading.read(x[:, end:], state)[0][row], last[row]))
        return Compared(pairs)

    return padded


padding_right = _padding_law("right")
padding_left = _padding_law("left")
