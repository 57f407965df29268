"""Made-up tasks whose answers are known: small programs to be executed (Fan et al. 2020, section 4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memspan.errors import MemspanError

VARIABLES = ("x", "y", "z", "p", "r")
HIGHEST = 10
"""Values are 1 to 10; each is one word."""
WORDS = (
    *VARIABLES, *map(str, range(1, HIGHEST + 1)), "=", "++", "--", "print", "if", "<", ">", ":", ";",
)  # fmt: skip
"""What a token id stands for."""
IDS = {word: i for i, word in enumerate(WORDS)}


@dataclass(frozen=True)
class Programs:
    """Random straight-line programs, with what they print in place after each ``print``.

    Statements, equally likely: ``x = 4 ;`` ``x ++ ;`` ``x -- ;`` ``print x 5 ;`` and
    ``if x > 3 : y ++ ;``, where the last's body is any of the first three. Values never leave 1 to 10.
    A program first assigns to each of its variables. Differs from the paper: the body of an ``if`` does
    not print, and a program ends where the row does.
    """

    n_variables: int = 3
    """Variables in a program (the paper: 2, 3 and 5)."""

    def __post_init__(self) -> None:
        if not 1 <= self.n_variables <= len(VARIABLES):
            raise MemspanError(
                f"n_variables must be 1 to {len(VARIABLES)}, not {self.n_variables}: change it"
            )

    @property
    def vocab_size(self) -> int:
        return len(WORDS)

    def batch(
        self, batch_size: int, n_tokens: int, random: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """One program per row, cut at ``n_tokens``.

        Returns:
            tokens int64 ``[B, N]``, and bool ``[B, N]``, true where a token is a printed value.
        """
        tokens = torch.empty(batch_size, n_tokens, dtype=torch.long)
        printed = torch.zeros(batch_size, n_tokens, dtype=torch.bool)
        for row in range(batch_size):
            words = self.program(n_tokens, random)[:n_tokens]
            tokens[row] = torch.tensor([IDS[word] for word in words])
            for i in range(2, n_tokens):
                printed[row, i] = words[i - 2] == "print"
        return tokens, printed

    def program(self, n_words: int, random: np.random.Generator) -> list[str]:
        """The words of a program of at least ``n_words``."""
        names = VARIABLES[: self.n_variables]
        state: dict[str, int] = {}
        words: list[str] = []
        for i in random.permutation(self.n_variables):
            words += _assign(names[i], state, random)
        while len(words) < n_words:
            kind = int(random.integers(5))
            name = names[random.integers(len(names))]
            if kind < 3:
                words += _change(kind, name, state, random)
            elif kind == 3:
                words += ["print", name, str(state[name]), ";"]
            else:
                sign, limit = "<>"[random.integers(2)], int(random.integers(1, HIGHEST + 1))
                holds = state[name] < limit if sign == "<" else state[name] > limit
                target = names[random.integers(len(names))]
                # Where the condition fails, the body is read and forgotten.
                body = _change(
                    int(random.integers(3)), target, state if holds else dict(state), random
                )
                words += ["if", name, sign, str(limit), ":", *body]
        return words


def execute(words: list[str]) -> list[int]:
    """What a program prints, by running it: the printed values in ``words`` are not looked at."""
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


def _assign(name: str, state: dict[str, int], random: np.random.Generator) -> list[str]:
    state[name] = int(random.integers(1, HIGHEST + 1))
    return [name, "=", str(state[name]), ";"]


def _change(kind: int, name: str, state: dict[str, int], random: np.random.Generator) -> list[str]:
    """An assignment, an increment or a decrement; the other way round at the end of the range."""
    if kind == 0:
        return _assign(name, state, random)
    step = 1 if kind == 1 else -1
    if not 1 <= state[name] + step <= HIGHEST:
        step = -step
    state[name] += step
    return [name, "++" if step > 0 else "--", ";"]
