"""Measurements inside a model: attention by distance and by part of its memory; for memories that are
matrices, the share of a written value that is read back later, and their rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from memspan.lab.measurement.span import histories
from memspan.lab.measurement.subject import ROWS, SEED, Budget, RunSubject, after_history
from memspan.memory import Memory
from memspan.models.defaults import AttentionWeights

T = TypeVar("T")
MOST_TOKENS = 8192
"""Tokens that attend."""
MOST_ROUNDS = 32
"""Rounds of written values."""


@dataclass(frozen=True)
class AttentionLayer:
    """One layer's attention, averaged over heads and tokens."""

    by_distance: tuple[float, ...]
    """Shares of the distances from each of ``Attention.distances`` up to the next."""
    by_kind: dict[str, float]
    """Shares of the parts of the memory, and of the segment if it is separate."""
    mean_distance: float
    """Tokens."""


@dataclass(frozen=True)
class Attention:
    """Attention by distance and by part of the memory, layer by layer."""

    tokens: int
    """Number of tokens that attended."""
    distances: tuple[int, ...]
    """Tokens: 0, 1, 2, 4, 8, ..."""
    layers: tuple[AttentionLayer, ...]


@dataclass(frozen=True)
class RetentionLayer:
    """One layer's matrices."""

    kept: tuple[float, ...]
    """Share of a written value that its key still reads, by ``Retention.after``."""
    effective_rank: float
    """The exponential of the entropy of the singular values, mean over heads."""


@dataclass(frozen=True)
class Retention:
    """The share of values written to matrices that is kept, layer by layer."""

    values: int
    """Number of values in every layer and head."""
    after: tuple[int, ...]
    """Further tokens."""
    full_rank: int
    """The maximum of the effective rank."""
    layers: tuple[RetentionLayer, ...]


Look = Callable[[Tensor, Memory], T | None]
"""A function that reads vectors after a memory and describes the inside (None: there is none)."""


def exists(subject: RunSubject, look: Look[T]) -> bool:
    """True if the architecture offers the quantity that ``look`` reads."""
    return look(*after_history(subject, np.random.default_rng(SEED), 1, 1)) is not None


def _looks(
    subject: RunSubject, look: Look[T], history: int, n_tokens: int, budget: Budget
) -> Iterator[T]:
    """Yield ``look`` at random places, while another one fits into the budget."""
    draws = np.random.default_rng(SEED)
    seconds = 0.0
    while budget.left() > seconds:
        before = budget.spent()
        found = look(*after_history(subject, draws, history, n_tokens))
        assert found is not None
        yield found
        seconds = budget.spent() - before


def attention(subject: RunSubject, history: int, budget: Budget) -> Iterator[Attention]:
    """Yield the attention over more and more segments after ``history`` tokens."""
    sums: list[Tensor] = []
    tokens = 0
    n_tokens = min(subject.segment_length, len(subject.tokens) - history - 1)
    look = subject.model.backbone.attention_weights
    for found in _looks(subject, look, history, n_tokens, budget):
        new = _sums(found)
        sums = [a + b for a, b in zip(sums, new, strict=True)] if sums else new
        tokens += len(found.layers[0]) * n_tokens
        by_distance, by_kind, distance = (each / sums[-1] for each in sums[:-1])
        n_bins = int(by_distance.sum(0).nonzero().max()) + 1
        layers = tuple(
            AttentionLayer(tuple(bins), dict(zip(found.kinds, kinds, strict=True)), mean)
            for bins, kinds, (mean,) in zip(
                by_distance[:, :n_bins].tolist(), by_kind.tolist(), distance.tolist(), strict=True
            )
        )
        yield Attention(tokens, (0, *(1 << i for i in range(n_bins - 1))), layers)
        if tokens >= MOST_TOKENS:
            return


def _sums(found: AttentionWeights) -> list[Tensor]:
    """Attention by distance ``[L, 64]`` and by kind ``[L, kinds]``, its distances and all of it
    ``[L, 1]``, added up over rows and tokens."""
    mean = torch.stack([weights.double().mean(1).cpu() for weights in found.layers])
    distances = found.distances.cpu().clamp(min=0).expand_as(mean[0])
    # 0, 1, 2 to 3, 4 to 7, ...: the number of binary digits.
    bins = distances.clamp(min=0.5).log2().floor().long() + 1
    by_distance = torch.zeros(len(mean), 64, dtype=torch.double)
    by_distance.index_add_(1, bins.flatten(), mean.flatten(1))
    by_kind = [(mean * keys.cpu()[:, None]).flatten(1).sum(1) for keys in found.kinds.values()]
    total = mean.flatten(1).sum(1, keepdim=True)
    return [by_distance, torch.stack(by_kind, 1), (mean * distances).flatten(1).sum(1, True), total]


def retention(subject: RunSubject, longest: int, budget: Budget) -> Iterator[Retention]:
    """Retention of values written after some history and read up to ``longest`` tokens later."""
    history = max(1, min(longest, len(subject.tokens) - longest - 2))
    after = [0, *histories(longest - 1)]
    kept: list[Tensor] = []
    ranks: list[Tensor] = []
    look = subject.model.backbone.write_retention
    for found in _looks(subject, look, history, longest, budget):
        kept.append(found.kept[:, after].cpu())
        ranks.append(found.effective_rank.cpu())
        means = (torch.stack(each).mean(0).tolist() for each in (kept, ranks))
        layers = tuple(RetentionLayer(tuple(row), rank) for row, rank in zip(*means, strict=True))
        yield Retention(len(kept) * ROWS, tuple(after), found.full_rank, layers)
        if len(kept) >= MOST_ROUNDS:
            return
