"""A look at a model before any law: does the state that is passed have an effect at all?

If it has none, a difference between two readings says nothing of the model: an argument by a name
that it does not know, say, was swallowed by ``**kwargs``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from statelaws.case import Case, Named
from statelaws.floor import difference, exact
from statelaws.protocol import Stateful
from statelaws.reading import Reading
from statelaws.states import PLAIN, leaves_of


@dataclass(frozen=True)
class NoEffect:
    """Why nothing can be said of a model's state."""

    detail: str
    stateless: bool
    """True if it does not even return a state that depends on what was read."""

    def __str__(self) -> str:
        return self.detail


@torch.no_grad()
def without_effect(model: Stateful[Any], tokens: int = 24, seed: int = 0) -> NoEffect | None:
    """Read on once from a state and once from an empty one, and say so if outputs are the same bits."""
    half = tokens // 2
    reading = Reading(model, Case(2, (half, tokens - half)), seed, Path())
    x = reading.x
    other = reading.other[:2]

    def after(inputs: Named | None) -> Named:
        torch.manual_seed(seed)
        state = reading.start()
        return state if inputs is None else reading.read(inputs[:, :half], state)[1]

    def outputs(part: Named, before: Named | None) -> Tensor:
        return reading.read(part, after(before))[0].value.clone()

    with torch.random.fork_rng():
        try:
            # Many models read single tokens in another way.
            for part in (x[:, half:], x[:, half : half + 1]):
                if difference(outputs(part, x), outputs(part, None)) > 0:
                    return None
            states = [leaves_of(after(inputs).value) for inputs in (x, other)]
            whole = outputs(x, None)
            anew = outputs(x[:, half:], None)
        except Exception:
            # The laws say what it cannot do.
            return None
    deviation = exact(whole).deviation
    if math.isnan(deviation):
        return None
    if _same(*states):
        detail = "it carries no state: it returns the same after any text"
        if difference(whole[:, half:], anew) > 1e-3 * deviation:
            detail += ", though outputs depend on earlier inputs of the same call"
        return NoEffect(detail, stateless=True)
    names = ", ".join(getattr(model, "state_arguments", ())) or "the second argument of read"
    return NoEffect(
        "the state that was passed has no effect: after it and after an empty one outputs are the "
        f"same to the last bit (passed as {names})",
        stateless=False,
    )


def _same(one: list[Any], other: list[Any]) -> bool:
    """True if two states hold the same, as far as that is seen."""
    if len(one) != len(other):
        return False
    for a, b in zip(one, other, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if difference(a, b) > 0:
                return False
        elif not (isinstance(a, PLAIN) and isinstance(b, PLAIN) and a == b):
            return False
    return True
