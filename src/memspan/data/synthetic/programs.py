"""Small programs to be executed (Fan et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memspan.checks import check_types
from memspan.errors import MemspanError

VARIABLES = ("x", "y", "z", "p", "r")
HIGHEST = 10
"""Largest value; each value from 1 on is one word."""
WORDS = (
    *VARIABLES, *map(str, range(1, HIGHEST + 1)), "=", "++", "--", "print", "if", "<", ">", ":", ";",
)  # fmt: skip
"""What a token id stands for."""
IDS = {word: i for i, word in enumerate(WORDS)}


@dataclass(frozen=True)
class Programs:
    """Random straight-line programs; what each ``print`` prints follows in the text.

    A program first assigns to each of its variables, as in ``x = 4 ;``, and never again. Then come
    ``print x 5 ;``, ``if x > 3 : y ++ ;``, where the body changes another variable than the
    condition tests (if there is one), and ``x ++ ;`` or ``x -- ;``, equally likely. Values never
    leave 1 to 10.

    A printed value is revealed, and unconditional changes can be counted in any order; a condition
    needs the current value. With few prints and many conditions, values depend on long chains of
    earlier ones. Differs from the paper: all assignments come first, the body of an ``if`` does not
    print, and a program ends where the row does.
    """

    n_variables: int = 3
    """Variables in a program (the paper: 2, 3 and 5)."""
    prints: float = 0.15
    """Share of the statements that print."""
    conditions: float = 0.5
    """Share of the statements with a condition."""

    def __post_init__(self) -> None:
        check_types(self)
        if not 1 <= self.n_variables <= len(VARIABLES):
            raise MemspanError(
                f"n_variables must be 1 to {len(VARIABLES)}, not {self.n_variables}: change it"
            )
        if min(self.prints, self.conditions) < 0 or self.prints + self.conditions > 1:
            raise MemspanError(
                f"prints {self.prints} and conditions {self.conditions} are shares: "
                "neither may be below 0, nor their sum above 1"
            )

    @property
    def vocab_size(self) -> int:
        """Number of words."""
        return len(WORDS)

    def batch(
        self, batch_size: int, n_tokens: int, random: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """One program per row, cut at ``n_tokens``.

        Returns:
            tokens int64 ``[B, N]``, and bool ``[B, N]``, true where a token is a printed value.
        """
        rows = [self.program(n_tokens, random)[:n_tokens] for _ in range(batch_size)]
        tokens = torch.tensor([[IDS[word] for word in row] for row in rows])
        printed = torch.zeros_like(tokens, dtype=torch.bool)
        printed[:, 2:] = tokens[:, :-2] == IDS["print"]
        return tokens, printed

    def program(self, n_words: int, random: np.random.Generator) -> list[str]:
        """The words of a program of at least ``n_words``."""
        names = VARIABLES[: self.n_variables]
        state: dict[str, int] = {}
        words: list[str] = []
        for i in random.permutation(self.n_variables):
            state[names[i]] = int(random.integers(1, HIGHEST + 1))
            words += [names[i], "=", str(state[names[i]]), ";"]
        while len(words) < n_words:
            kind = random.random()
            name = names[random.integers(len(names))]
            if kind < self.prints:
                words += ["print", name, str(state[name]), ";"]
            elif kind < self.prints + self.conditions:
                # A limit that every value meets, or none, would not be a condition.
                sign, limit = "<>"[random.integers(2)], int(random.integers(2, HIGHEST))
                holds = state[name] < limit if sign == "<" else state[name] > limit
                others = [other for other in names if other != name] or names
                target = others[random.integers(len(others))]
                # If the condition fails, the body has no effect.
                body = _change(random, target, state if holds else dict(state))
                words += ["if", name, sign, str(limit), ":", *body]
            else:
                words += _change(random, name, state)
        return words


def execute(words: list[str]) -> list[int]:
    """Run a program and return what it prints; the printed values in ``words`` are ignored."""
    state: dict[str, int] = {}
    printed = []
    for statement in " ".join(words).split(" ;"):
        parts = statement.split()
        if parts[:1] == ["if"]:
            left, sign, right = state[parts[1]], parts[2], int(parts[3])
            if not (left < right if sign == "<" else left > right):
                continue
            parts = parts[5:]
        if parts[:1] == ["print"]:
            printed.append(state[parts[1]])
        elif parts[1:2] == ["="]:
            state[parts[0]] = int(parts[2])
        elif parts:
            state[parts[0]] += 1 if parts[1] == "++" else -1
    return printed


def _change(random: np.random.Generator, name: str, state: dict[str, int]) -> list[str]:
    """Increment or decrement a variable at random; at the end of the range, the only way left."""
    step = 1 if random.integers(2) else -1
    if not 1 <= state[name] + step <= HIGHEST:
        step = -step
    state[name] += step
    return [name, "++" if step > 0 else "--", ";"]
