"""Recall over distance: how far back does a model remember?

An endless stream of three kinds of tokens. A *write* says a key and its value, both in one token, and
keys are written again and again. A *question* names a key, and its target is the value last written to
it. *Fillers* say nothing. Targets are tokens of their own, which never occur in the input: the answer
is found in the write or nowhere. How many tokens back that write is, the *distance*, is known exactly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

NOT_SCORED = -100
"""The target of a token that is not scored."""
NEVER = -(2**40)
"""When a key was written that has not been written yet."""


@dataclass(frozen=True)
class RecallSegment:
    """The next tokens of every row."""

    tokens: Tensor
    """int64 ``[B, T]``."""
    targets: Tensor
    """int64 ``[B, T]``; :data:`NOT_SCORED` where nothing is asked."""
    distances: Tensor
    """Tokens from the question back to the write it asks for, int64 ``[B, T]``; 0 where nothing is
    asked."""


@dataclass(frozen=True)
class Recall:
    """Writes, questions and fillers; distances are log-uniform from 1 to ``longest``.

    A question draws its distance, and then asks for the key whose last write is nearest to that on a
    log scale. So that one is always near, a write goes to the key whose previous write is missed
    least: the one with the narrowest gap, in log distance, between its neighbours; or to a key that
    was last written more than ``longest`` tokens ago. With 16 keys every octave from 32 on gets its
    share to 5 %. From 4 to 32 octaves get up to half as much again, and below 4 less: only a quarter
    of the tokens are writes.
    """

    n_keys: int = 16
    """Keys, K."""
    n_values: int = 16
    """Values, V. A model that only guesses is right in 1 of V cases."""
    longest: int = 4096
    """Longest distance asked for."""
    writes: float = 0.25
    """Share of the tokens that are writes."""
    questions: float = 0.5
    """Share of the tokens that are questions; the rest are fillers."""

    def __post_init__(self) -> None:
        if min(self.n_keys, self.n_values, self.longest) < 1:
            raise ValueError("n_keys, n_values and longest must be at least 1")
        if not (self.writes > 0 and self.questions >= 0 and self.writes + self.questions <= 1):
            raise ValueError(
                f"writes {self.writes} and questions {self.questions} are shares: the first must be "
                "above 0, and their sum not above 1"
            )

    @property
    def filler(self) -> int:
        """The filler's token. Below it are the writes, ``key * V + value``."""
        return self.n_keys * self.n_values

    @property
    def first_question(self) -> int:
        """The token that asks for key 0; those of the other keys follow."""
        return self.filler + 1

    @property
    def first_answer(self) -> int:
        """The target that stands for value 0; those of the other values follow."""
        return self.first_question + self.n_keys

    @property
    def vocab_size(self) -> int:
        """Tokens of all kinds, targets among them."""
        return self.first_answer + self.n_values

    def stream(
        self, batch_size: int, seed: int, live: int | Sequence[int] | None = None
    ) -> RecallStream:
        """Endless rows, drawn from ``seed`` alone.

        Args:
            batch_size: rows, B.
            seed: of all random draws.
            live: how many of the keys are used, in all rows or in each (None: all keys). Each row
                has its own random choice of them.

        Raises:
            ValueError: there are not that many keys.
        """
        return RecallStream(self, batch_size, seed, live)


class RecallStream:
    """A position in the rows of a :class:`Recall`; it remembers the last write of every key."""

    def __init__(
        self, task: Recall, batch_size: int, seed: int, live: int | Sequence[int] | None = None
    ) -> None:
        numbers = np.broadcast_to(task.n_keys if live is None else np.asarray(live), (batch_size,))
        if numbers.min() < 1 or numbers.max() > task.n_keys:
            raise ValueError(f"live must lie in 1 .. {task.n_keys}, the task's keys, not {live}")
        self.task = task
        self._random = np.random.default_rng(seed)
        self._rows = [
            _Row(task, self._random.permutation(task.n_keys)[:n].tolist()) for n in numbers
        ]

    def next(self, n_tokens: int, longest: int | None = None) -> RecallSegment:
        """The next ``n_tokens`` of every row. How a stream is cut changes nothing in it.

        Args:
            n_tokens: T.
            longest: longest distance asked for in this segment (None: the task's); a curriculum
                raises it.
        """
        longest = self.task.longest if longest is None else longest
        draws = self._random.random((n_tokens, len(self._rows), 2)).tolist()
        read = [
            [
                row.next(kind, detail, longest)
                for row, (kind, detail) in zip(self._rows, at_once, strict=True)
            ]
            for at_once in draws
        ]
        found = torch.tensor(read, dtype=torch.long).reshape(n_tokens, len(self._rows), 3)
        return RecallSegment(*found.permute(2, 1, 0).contiguous())


class _Row:
    """One row of a stream."""

    def __init__(self, task: Recall, keys: list[int]) -> None:
        self.task = task
        self.position = 0
        # In the order of their last writes, oldest first.
        self.keys = keys
        self.written = [NEVER] * len(keys)
        self.values = dict.fromkeys(keys, 0)

    def next(self, kind: float, detail: float, longest: int) -> tuple[int, int, int]:
        """The next token, its target and its distance, from two numbers drawn from 0 to 1."""
        now = self.position
        task = self.task
        self.position += 1
        if kind < task.writes:
            value = int(detail * task.n_values)
            return self._write(now, value, longest), NOT_SCORED, 0
        # Where nothing is in reach yet, nothing can be asked for.
        if kind >= task.writes + task.questions or now - self.written[-1] > longest:
            return task.filler, NOT_SCORED, 0
        chosen = self._nearest(now, longest**detail, longest)
        key = self.keys[chosen]
        answer = task.first_answer + self.values[key]
        return task.first_question + key, answer, now - self.written[chosen]

    def _write(self, now: int, value: int, longest: int) -> int:
        chosen = 0
        if now - self.written[0] <= longest:
            ages = [longest, *(now - time for time in self.written), 1]
            chosen = min(range(len(self.keys)), key=lambda i: ages[i] / ages[i + 2])
        key = self.keys.pop(chosen)
        del self.written[chosen]
        self.keys.append(key)
        self.written.append(now)
        self.values[key] = value
        return key * self.task.n_values + value

    def _nearest(self, now: int, distance: float, longest: int) -> int:
        """The key whose last write is nearest to ``distance``, by ratio."""
        newer = bisect_left(self.written, now - distance)
        older = newer - 1
        if newer == len(self.written):
            return older
        if older < 0 or now - self.written[older] > longest:
            return newer
        between = (now - self.written[older]) * (now - self.written[newer])
        return older if distance**2 > between else newer
