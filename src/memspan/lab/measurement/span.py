"""The span: how much history the loss depends on.

The same target tokens are scored with ``n`` tokens of history, ``n`` log-spaced, from an empty memory
each time. The span is the smallest ``n`` whose loss is within :data:`TOLERANCE` of the longest
history's; its interval reaches from the first ``n`` for which that may be true to the first for which
it surely is. Where the loss is worst with the longest history there is no such number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from memspan.lab.measurement.statistics import Blocks, Estimate
from memspan.lab.measurement.subject import SEED, Budget, Cuts, Subject

TOLERANCE = 0.01
"""Bits per byte."""
BLOCK = 64
"""Neighbouring targets in the text that form a block."""
MOST_ROWS = 32
"""Rows of a round."""
MOST_READ = 128
"""Rows that are read at once."""
MOST_TARGETS = 32768


@dataclass(frozen=True)
class SpanPoint:
    """The loss with this much history."""

    history: int
    """Tokens, n at least: from 16 on, neighbours are read together, and have up to n + n/8."""
    bits_per_byte: float
    difference: Estimate
    """Difference from the longest history's loss, on the same targets."""


@dataclass(frozen=True)
class Span:
    """The length of history on which the loss depends."""

    tokens: int | None
    """The span: the smallest history within the tolerance (None: the loss is worst with the longest
    history, so that no history is as good as that)."""
    low: int
    """The smallest history whose difference's 95 % interval begins within the tolerance."""
    high: int
    """The smallest history whose difference's interval lies within the tolerance."""
    beyond: bool
    """True if only the longest history is within the tolerance, so that the span may be longer."""
    targets: int
    """Tokens that were scored with every history."""
    blocks: int
    """Blocks of neighbouring targets; the intervals come from how they differ."""
    points: tuple[SpanPoint, ...]
    first: np.ndarray = field(repr=False, compare=False)
    """Position of each block's first target, ``[N]``."""
    losses: np.ndarray = field(repr=False, compare=False)
    """Nats ``[N, W, len(points)]``."""

    @property
    def longest(self) -> int:
        """Longest history in tokens."""
        return self.points[-1].history


def histories(longest: int) -> list[int]:
    """1, 2, 4, ... up to ``longest``."""
    return [1 << i for i in range(longest.bit_length()) if 1 << i <= longest]


def rounds(budget: Budget) -> Iterator[int]:
    """Numbers of rows for more and more rounds; the next begins only if it would end in time."""
    rows = 8
    while rows > 0:
        before = budget.spent()
        yield rows
        seconds = (budget.spent() - before) / rows
        rows = min(2 * rows, MOST_ROWS, int(budget.left() / seconds) if seconds else MOST_ROWS)


def affordable(scale: Iterable[int], budget: Budget) -> Iterator[int]:
    """The distances of ``scale``, in order, while the budget lasts for a first round."""
    last = 0.0
    for n in scale:
        if budget.left() < 2 * last:
            return
        before = budget.spent()
        yield n
        last = budget.spent() - before


def measured(subject: Subject, longest: int, budget: Budget) -> Iterator[Span]:
    """The span from more and more targets of a text with at least ``longest`` tokens and a block. If
    the budget does not last for one round, the longest history is shorter."""
    n_tokens = len(subject.tokens)
    # Fewer targets in a short text.
    width = min(BLOCK, 1 << (max(1, n_tokens // 16).bit_length() - 1))
    # Each block's first target, in random order, the same for every run.
    blocks = np.arange(longest, n_tokens - width + 1, width)
    waiting = np.random.default_rng(SEED).permutation(blocks)
    scale: Iterable[int] = affordable(histories(longest), budget)
    nats: list[np.ndarray] = []
    n_bytes: list[np.ndarray] = []
    done = 0
    for turn, rows in enumerate(rounds(budget)):
        chosen = waiting[done : done + rows]
        # The golden ratio spreads the places of blocks in their segments evenly.
        place = int(subject.segment_length * (turn * 0.6180339887 % 1))
        found = {n: _nats(subject, chosen, width, place, n) for n in scale}
        scale = list(found)
        if len(scale) < 2:
            return
        done += len(chosen)
        nats.append(np.stack(list(found.values()), -1))
        n_bytes.append(subject.n_bytes(subject.segment(chosen, width).targets))
        yield _span(scale, waiting[:done], np.concatenate(nats), np.concatenate(n_bytes))
        if done == len(waiting) or done * width >= MOST_TARGETS:
            return


def _nats(subject: Subject, first: np.ndarray, width: int, place: int, n: int) -> np.ndarray:
    """Nats ``[B, W]`` of the blocks from ``first [B]`` on, after ``n`` tokens of history.

    ``place``: position of the blocks' first input in its segment. The text has the same segments for
    all histories, or a history's loss would depend on where it puts a target.
    """
    # Neighbours are read together where that changes their history by little.
    w = max(1, min(width, n // 8))
    nats = np.empty((len(first), width))
    for cuts, offsets in _alike(subject, range(0, width, w), n, w, place, len(first)):
        length = cuts[-1][1]
        from_here = first + np.array(offsets)[:, None] + w - length
        losses = subject.losses(subject.segment(from_here.ravel(), length), cuts, w)
        for i, offset in enumerate(offsets):
            nats[:, offset : offset + w] = losses[i * len(first) : (i + 1) * len(first)]
    return nats


def _alike(
    subject: Subject, offsets: range, n: int, w: int, place: int, n_blocks: int
) -> Iterator[tuple[Cuts, tuple[int, ...]]]:
    """Offsets in a block that are cut alike, and so can be read side by side, :data:`MOST_READ` rows at
    a time. With short histories most are: few meet the end of a segment."""
    alike: dict[Cuts, list[int]] = {}
    for offset in offsets:
        # The first of w neighbours has n tokens, the others more.
        cuts = subject.cuts(n + w - 1, n - 1 - offset - place)
        alike.setdefault(cuts, []).append(offset)
    for cuts, found in alike.items():
        together = max(1, MOST_READ // n_blocks)
        for i in range(0, len(found), together):
            yield cuts, tuple(found[i : i + together])


def _span(scale: Sequence[int], first: np.ndarray, nats: np.ndarray, n_bytes: np.ndarray) -> Span:
    blocks = Blocks(nats.sum(1), n_bytes)
    points = tuple(
        SpanPoint(n, float(blocks.bits_per_byte[i]), blocks.difference(i, len(scale) - 1))
        for i, n in enumerate(scale)
    )
    low, span, high = (
        next(p.history for p in points if getattr(p.difference, bound) <= TOLERANCE)
        for bound in ("low", "value", "high")
    )
    best = min(points, key=lambda point: point.bits_per_byte)
    worst_last = span == scale[0] and best.difference.high < -TOLERANCE
    return Span(
        tokens=None if worst_last else span,
        low=low,
        high=high,
        beyond=span == scale[-1],
        targets=nats[..., 0].size,
        blocks=len(nats),
        points=points,
        first=first,
        losses=nats,
    )
