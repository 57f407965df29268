"""Gradients flow through the state as through one long call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from statelaws.case import Case, Named, join
from statelaws.errors import RefusedError
from statelaws.laws.cuts import aligned
from statelaws.laws.law import (
    ROWS,
    Compared,
    Law,
    length_of,
    outputs_of,
    state_after,
)
from statelaws.protocol import Claims, Stateful
from statelaws.reading import Reading


def _weights(module: nn.Module) -> list[Tensor]:
    return [p for p in module.parameters() if p.is_floating_point() and p.requires_grad]


def _slope(reading: Reading, outputs: Named) -> Named:
    """The gradient of a loss of ``outputs`` with respect to all weights."""
    value = outputs.value.flatten()
    if not value.requires_grad:
        raise RefusedError("its outputs carry no gradients")
    loss = value @ torch.linspace(-1, 1, len(value), dtype=value.dtype, device=value.device)
    slopes = torch.autograd.grad(loss, _weights(reading.model.module), materialize_grads=True)
    text = f"gradient({outputs.text})"
    return reading.given(torch.cat([s.flatten() for s in slopes]), text, "gradient")


GRADIENT = """\
def gradient(y):
    loss = y.flatten() @ torch.linspace(-1, 1, y.numel(), dtype=y.dtype)
    slopes = torch.autograd.grad(loss, list(module.parameters()), materialize_grads=True)
    return torch.cat([slope.flatten() for slope in slopes])"""


@torch.enable_grad()
def _whole_gradient(reading: Reading, case: Case) -> Tensor:
    whole = outputs_of(reading, reading.x, [case.tokens])
    return _slope(reading, whole[:, case.pieces[0] :]).value


def _no_gradients(model: Stateful[Any]) -> str | None:
    if not model.claims.carries_gradients:
        return "it detaches its state, by design"
    if not model.claims.cuts:
        return "outputs depend on where a text is cut, by design"
    return None if _weights(model.module) else "it has no weights that are trained"


def _gradient_cases(claims: Claims, seed: int) -> Iterator[Case]:
    if not claims.anywhere:
        yield from (Case(ROWS, pieces) for pieces in aligned(claims)[:4])
        return
    tokens = length_of(claims)
    half = tokens // 2
    rest = tokens - tokens // 2
    for pieces in (
        (half, rest),
        (half, 1, 1, 2),
        (1, 1, rest),
        (half // 2, half - half // 2, rest),
    ):
        yield Case(ROWS, pieces)


@Law(
    "gradients",
    "gradients flow through the state as through one long call",
    _gradient_cases,
    by_design=_no_gradients,
    reference=_whole_gradient,
)
def gradients(reading: Reading, case: Case) -> Compared:
    reading.lines += GRADIENT.splitlines()
    first, *later = case.pieces
    whole = outputs_of(reading, reading.x, [case.tokens])[:, first:]
    outputs, _ = reading.read_all(reading.x, case.pieces)
    cut = join(outputs[first > 0 :])
    expected = _slope(reading, whole)
    seen = _slope(reading, cut)
    with torch.no_grad():
        state = state_after(reading, [first])
    without = _slope(reading, join(reading.read_all(reading.x[:, first:], later, state)[0]))
    otherwise = "hardly any gradient flows through the state, even in one call"
    return Compared([(expected, seen)], [(expected, without)], otherwise)
