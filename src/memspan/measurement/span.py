"""The span: how much history the loss depends on.

The same target tokens are scored with ``n`` tokens of history, ``n`` log-spaced, from an empty memory
each time. The span is the smallest ``n`` whose loss is within :data:`TOLERANCE` of the longest
history's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from memspan.measurement.budget import Budget
from memspan.measurement.statistics import Blocks, Estimate, interval
from memspan.measurement.subject import SEED, Cuts, Subject

TOLERANCE = 0.01
"""Bits per byte."""
BLOCK = 64
"""Targets that stand together in the text, and are resampled together."""
MOST_ROWS = 32
"""Blocks of a round."""
MOST_READ = 128
"""Rows that are read at once."""
MOST_TARGETS = 32768


@dataclass(frozen=True)
class SpanPoint:
    """The loss with so much history."""

    history: int
    """Tokens, n. A target has n to 1.25 n, the neighbours being read together."""
    bits_per_byte: float
    difference: Estimate
    """From the longest history's, on the same targets."""


@dataclass(frozen=True)
class Span:
    """How much history the loss depends on."""

    tokens: int
    """The span: the smallest history within the tolerance."""
    low: int
    """Of the spans of resampled blocks, 95 % lie between this and ``high``."""
    high: int
    beyond: bool
    """Whether only the longest history is within the tolerance, so that the span may be longer."""
    targets: int
    """Tokens that were scored with every history."""
    points: tuple[SpanPoint, ...]
    first: np.ndarray = field(repr=False, compare=False)
    """Position of each block's first target, ``[N]``."""
    losses: np.ndarray = field(repr=False, compare=False)
    """Nats ``[N, W, len(points)]``."""


def histories(longest: int) -> list[int]:
    """1, 2, 4, ... up to ``longest``."""
    return [1 << i for i in range(longest.bit_length()) if 1 << i <= longest]


def measured(subject: Subject, longest: int, budget: Budget) -> Iterator[Span]:
    """The span from more and more targets, as long as the budget lasts.

    Args:
        subject: its text has at least ``longest`` tokens and a block of targets.
        longest: tokens of history at most.
        budget: where it does not last for one round, the longest history is shorter.
    """
    width = block_width(len(subject.tokens))
    waiting = _blocks(len(subject.tokens), longest, width)
    scale, rows, seconds = histories(longest), 8, 0.0
    first: list[np.ndarray] = []
    nats: list[np.ndarray] = []
    n_bytes: list[np.ndarray] = []
    for turn in range(len(waiting)):
        rows = min(rows, len(waiting), MOST_ROWS)
        # Not once it is known that the round would not end in time.
        if seconds:
            rows = min(rows, int(budget.left() / seconds))
        if rows < 1 or sum(len(f) for f in first) * width >= MOST_TARGETS:
            return
        chosen, waiting = waiting[:rows], waiting[rows:]
        before = budget.spent()
        # The golden ratio spreads the places of blocks in their segments evenly.
        place = int(subject.segment_length * (turn * 0.6180339887 % 1))
        found = list(_round(subject, chosen, width, place, scale, None if turn else budget))
        scale = scale[: len(found)]
        if len(scale) < 2:
            return
        seconds = (budget.spent() - before) / rows
        first.append(chosen)
        nats.append(np.stack(found, -1))
        n_bytes.append(subject.n_bytes(subject.segment(chosen, width).targets))
        yield _span(scale, *map(np.concatenate, (first, nats, n_bytes)))
        rows *= 2


def block_width(n_tokens: int) -> int:
    """Targets of a block: :data:`BLOCK`, fewer in a short text."""
    return min(BLOCK, 1 << (max(1, n_tokens // 16).bit_length() - 1))


def _blocks(n_tokens: int, longest: int, width: int) -> np.ndarray:
    """Positions of the blocks' first targets, in random order, the same for every run."""
    blocks = np.arange(longest, n_tokens - width + 1, width)
    return np.random.default_rng(SEED).permutation(blocks)


def _round(
    subject: Subject,
    first: np.ndarray,
    width: int,
    place: int,
    scale: Sequence[int],
    budget: Budget | None,
) -> Iterator[np.ndarray]:
    """Nats ``[B, W]`` of the blocks from ``first [B]`` on, for each history.

    Args:
        place: of the blocks' first input in its segment. The segments of the text are the same for
            all histories, or a history's loss would depend on where it puts a target.
        budget: stop before a history that it does not last for (None: stop at nothing).
    """
    last = 0.0
    for n in scale:
        if budget is not None and budget.left() < 2 * last:
            return
        before = 0.0 if budget is None else budget.spent()
        # Neighbours are read together where that changes their history by little.
        w = max(1, min(width, n // 4))
        nats = np.empty((len(first), width))
        for cuts, offsets in _alike(subject, range(0, width, w), n, w, place, len(first)):
            from_here = first + np.array(offsets)[:, None] - n + 1
            losses = subject.losses(subject.segment(from_here.ravel(), n + w - 1), cuts)
            for i, offset in enumerate(offsets):
                rows = slice(i * len(first), (i + 1) * len(first))
                nats[:, offset : offset + w] = losses[rows, -w:]
        last = 0.0 if budget is None else budget.spent() - before
        yield nats


def _alike(
    subject: Subject, offsets: range, n: int, w: int, place: int, n_blocks: int
) -> Iterator[tuple[Cuts, tuple[int, ...]]]:
    """Offsets in a block that are cut alike, and so can be read side by side, :data:`MOST_READ` rows at
    a time. Of short histories that is most: few meet the end of a segment."""
    alike: dict[Cuts, list[int]] = {}
    for offset in offsets:
        cuts = subject.cuts(n + w - 1, n - 1 - offset - place)
        alike.setdefault(cuts, []).append(offset)
    for cuts, found in alike.items():
        together = max(1, MOST_READ // n_blocks)
        for i in range(0, len(found), together):
            yield cuts, tuple(found[i : i + together])


def _span(scale: Sequence[int], first: np.ndarray, nats: np.ndarray, n_bytes: np.ndarray) -> Span:
    blocks = Blocks(nats.sum(1), n_bytes)
    differences = blocks.resampled - blocks.resampled[:, -1:]
    steps = np.array(scale)
    low, high = interval(steps[(differences <= TOLERANCE).argmax(1)])
    points = tuple(
        SpanPoint(n, float(blocks.bits_per_byte[i]), blocks.difference(i, len(scale) - 1))
        for i, n in enumerate(scale)
    )
    span = next(p.history for p in points if p.difference.value <= TOLERANCE)
    return Span(
        tokens=span,
        low=int(low),
        high=int(high),
        beyond=span == scale[-1],
        targets=nats[..., 0].size,
        points=points,
        first=first,
        losses=nats,
    )
