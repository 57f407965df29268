"""Repeats: random strings that appear twice, and what the second appearance costs.

A string of tokens drawn by their frequencies in the text is predictable only for a model that remembers
its first appearance. The text itself stands between the two. In the control, another such string
replaces the first appearance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from memspan.lab.data.streams import Segment
from memspan.lab.measurement.span import affordable, histories, rounds
from memspan.lab.measurement.statistics import Blocks, Estimate
from memspan.lab.measurement.subject import SEED, Budget, Subject

LENGTH = 16
"""Tokens of a string. The first is not scored: nothing announces it."""
MOST_STRINGS = 2048


@dataclass(frozen=True)
class RepeatPoint:
    """Result for second appearances this many tokens after the first."""

    distance: int
    """Tokens from a token to its repetition."""
    repeated: float
    """Bits per byte of the second appearance."""
    control: float
    """The same where the string has not appeared before."""
    gain: Estimate
    """Bits per byte that the first appearance saves."""


@dataclass(frozen=True)
class Repeats:
    """Bits that a string's first appearance saves at its second."""

    strings: int
    """Number of strings at every distance."""
    points: tuple[RepeatPoint, ...]

    @property
    def longest(self) -> int:
        """Longest distance in tokens."""
        return self.points[-1].distance


def measured(subject: Subject, longest: int, budget: Budget) -> Iterator[Repeats]:
    """Yield results from more and more strings, as long as the budget lasts."""
    draws = np.random.default_rng(SEED)
    scale: Iterable[int] = affordable([n for n in histories(longest) if n >= LENGTH], budget)
    nats: list[np.ndarray] = []
    n_bytes: list[np.ndarray] = []
    done = 0
    for rows in rounds(budget):
        strings, others = (_strings(subject, draws, rows) for _ in range(2))
        line = int(draws.integers(subject.segment_length))
        found = {}
        for n in scale:
            between = _text(subject, draws, rows, n - LENGTH)
            found[n] = _costs(subject, strings, others, between, line)
        scale = list(found)
        if not scale:
            return
        nats.append(np.concatenate(list(found.values()), 1))
        n_bytes.append(subject.n_bytes(torch.from_numpy(strings[:, 1:])))
        blocks = Blocks(np.concatenate(nats), np.concatenate(n_bytes))
        repeated, control = blocks.bits_per_byte.reshape(-1, 2).T.tolist()
        points = tuple(
            RepeatPoint(n, repeated[i], control[i], gain=blocks.difference(2 * i + 1, 2 * i))
            for i, n in enumerate(scale)
        )
        done += rows
        yield Repeats(done, points)
        if done >= MOST_STRINGS:
            return


def _strings(subject: Subject, draws: np.random.Generator, rows: int) -> np.ndarray:
    """int64 ``[rows, LENGTH]``, each token drawn from the text by itself; no unknown ones."""
    tokens = subject.tokens[draws.integers(len(subject.tokens), size=(rows, LENGTH))]
    while (unknown := tokens == subject.tokenizer.unknown).any():
        tokens[unknown] = subject.tokens[draws.integers(len(subject.tokens), size=unknown.sum())]
    return tokens.astype(np.int64)


def _text(subject: Subject, draws: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """int64 ``[rows, length]`` from anywhere in the text."""
    first = draws.integers(len(subject.tokens) - length, size=rows)
    return subject.tokens[first[:, None] + np.arange(length)].astype(np.int64)


def _costs(
    subject: Subject, strings: np.ndarray, others: np.ndarray, between: np.ndarray, line: int
) -> np.ndarray:
    """Nats ``[B, 2]`` of ``strings`` but their first tokens, after themselves and after ``others``."""
    first = np.concatenate([strings, others])
    rows = np.concatenate([first, np.tile(between, (2, 1)), np.tile(strings, (2, 1))], 1)
    tokens = torch.from_numpy(rows)
    segment = Segment(tokens[:, :-1], tokens[:, 1:], None, torch.zeros(len(tokens)).long())
    losses = subject.losses(segment, subject.cuts(rows.shape[1] - 1, line), LENGTH - 1)
    return np.stack(np.split(losses.sum(1), 2), 1)
