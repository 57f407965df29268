"""The type of a law, and the cases and readings that several laws share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from statelaws.case import Case, Named, join
from statelaws.protocol import Claims, Stateful
from statelaws.reading import LACKS, Reading

ROWS = 3
MANY_ROWS = 33
"""Rows of one case: some models take another path for many."""
LONG = 130
"""Tokens of a few cases of ``cuts``, beyond the lengths that others have: a chunk of 64 that no claim
names, a counter of eight bits."""


@dataclass
class Compared:
    """Values that must be equal, and values that must differ for the case to show anything."""

    equal: list[tuple[Named, Named]]
    """Expected, seen."""
    unequal: list[tuple[Named, Named]] | None = None
    """Values that must differ (None: outputs from a wrong state, as for most laws)."""
    otherwise: str = ""
    """The message if it does not."""


Cases = Callable[[Claims, int], Iterable[Case]]
"""The cases for a model's claims and a seed."""
Compare = Callable[[Reading, Case], Compared]


@dataclass
class Law:
    """One law. It decorates the function that tries a case of it, and takes its place."""

    name: str
    says: str
    cases: Cases
    needs: tuple[str, ...] = ()
    """Functions of which a model must have one."""
    by_design: Callable[[Stateful[Any]], str | None] = lambda _: None
    """Why the law does not apply to a model that has them, if so."""
    reference: Callable[[Reading, Case], Tensor] | None = None
    """The computation whose floor is measured (None: the case's outputs)."""
    remark: Callable[[Case], tuple[Case, str] | None] = lambda _: None
    """For a case that breaks it, another case and the remark to make if that breaks it as well."""
    compare: Compare = field(init=False)

    def __call__(self, compare: Compare) -> Law:
        self.compare = compare
        return self

    def missing(self, model: Stateful[Any]) -> str | None:
        """Why the law cannot be tried with a model, if so."""
        lacking = [LACKS[name] for name in self.needs if getattr(model, name, None) is None]
        if lacking and len(lacking) == len(self.needs):
            return ", and ".join(lacking)
        return self.by_design(model)


def length_of(claims: Claims) -> int:
    """Tokens that cross every internal length twice; if they are few, on both sides of a cut."""
    longest = min(max(claims.lengths.values(), default=4), 256)
    tokens = max(24, (4 if longest <= 32 else 2) * longest + 5)
    return tokens if claims.cuts < 2 else max(tokens, 4 * claims.cuts + claims.cuts // 2)


def cases_of(
    pieces: Callable[[int, int], list[tuple[int, ...]]], variants: Iterable[str] = ("",)
) -> Cases:
    """Every variant of ``pieces(half, rest)``, the two halves of the tokens."""

    def cases(claims: Claims, seed: int) -> list[Case]:
        tokens = length_of(claims)
        found = pieces(tokens // 2, tokens - tokens // 2)
        return [Case(ROWS, each, variant) for each in found for variant in variants]

    return cases


def plain_pieces(half: int, rest: int) -> list[tuple[int, ...]]:
    """Two calls that make a state, and one that reads on: many tokens, and one."""
    return [(0, 1, 3), (half - 1, 1, 1), (half // 2, half - half // 2, rest)]


def outputs_of(reading: Reading, inputs: Named, pieces: Iterable[int]) -> Named:
    """All outputs of these pieces."""
    return join(reading.read_all(inputs, pieces)[0])


def state_after(reading: Reading, pieces: Iterable[int], inputs: Named | None = None) -> Named:
    """The state after these pieces."""
    return reading.read_all(reading.x if inputs is None else inputs, pieces)[1]


def reusable_state(reading: Reading, pieces: Iterable[int]) -> Named:
    """The state after these pieces, to be used more than once."""
    outputs, state = reading.read_all(reading.x, pieces)
    return state if outputs else reading.given(state.value, state.text)
