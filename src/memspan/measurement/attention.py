"""Attention by distance, and by part of the memory, in every layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memspan.measurement.subject import SEED, Budget, RunSubject, after_history
from memspan.models.protocol import AttentionWeights

MOST_TOKENS = 8192


@dataclass(frozen=True)
class AttentionLayer:
    """Where one layer's attention goes, averaged over heads and tokens."""

    by_distance: tuple[float, ...]
    """Shares of the distances from each of ``Attention.distances`` up to the next."""
    by_kind: dict[str, float]
    """Shares of the parts of the memory, and of the segment if it is separate."""
    mean_distance: float
    """Tokens."""


@dataclass(frozen=True)
class Attention:
    """Where attention goes."""

    tokens: int
    """Number of tokens that attended."""
    distances: tuple[int, ...]
    """Tokens: 0, 1, 2, 4, 8, ..."""
    layers: tuple[AttentionLayer, ...]


def exists(subject: RunSubject) -> bool:
    """Whether the architecture has attention to look at."""
    return _weights(subject, np.random.default_rng(SEED), 1, 1) is not None


def measured(subject: RunSubject, history: int, budget: Budget) -> Iterator[Attention]:
    """The attention of more and more segments after ``history`` tokens."""
    draws = np.random.default_rng(SEED)
    total: list[_Sums] = []
    seconds, tokens = 0.0, 0
    n_tokens = min(subject.segment_length, len(subject.tokens) - history - 1)
    while tokens < MOST_TOKENS and budget.left() > seconds:
        before = budget.spent()
        found = _weights(subject, draws, history, n_tokens)
        assert found is not None
        new = [_Sums.of(weights, found) for weights in found.layers]
        total = [a + b for a, b in zip(total, new, strict=True)] if total else new
        tokens += len(found.layers[0]) * n_tokens
        seconds = budget.spent() - before
        n_bins = max(int(sums.by_distance.nonzero().max()) for sums in total) + 1
        scale = tuple(0 if i == 0 else 1 << (i - 1) for i in range(n_bins))
        yield Attention(tokens, scale, tuple(sums.layer(n_bins) for sums in total))


def _weights(
    subject: RunSubject, draws: np.random.Generator, history: int, n_tokens: int
) -> AttentionWeights | None:
    x, memory = after_history(subject, draws, history, n_tokens)
    return subject.model.backbone.attention_weights(x, memory)


@dataclass(frozen=True)
class _Sums:
    """Attention added up over rows, heads and tokens."""

    by_distance: Tensor
    by_kind: dict[str, float]
    distance: float
    total: float

    @classmethod
    def of(cls, weights: Tensor, found: AttentionWeights) -> _Sums:
        mean = weights.double().mean(1).cpu()
        distances = found.distances.cpu().clamp(min=0).expand_as(mean)
        # 0, 1, 2 to 3, 4 to 7, ...: the number of binary digits.
        bins = distances.clamp(min=0.5).log2().floor().long() + 1
        return cls(
            torch.zeros(64, dtype=torch.double).index_add(0, bins.flatten(), mean.flatten()),
            {name: float((mean * keys.cpu()[:, None]).sum()) for name, keys in found.kinds.items()},
            float((mean * distances).sum()),
            float(mean.sum()),
        )

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(
            self.by_distance + other.by_distance,
            {name: value + other.by_kind[name] for name, value in self.by_kind.items()},
            self.distance + other.distance,
            self.total + other.total,
        )

    def layer(self, n_bins: int) -> AttentionLayer:
        return AttentionLayer(
            tuple((self.by_distance[:n_bins] / self.total).tolist()),
            {name: value / self.total for name, value in self.by_kind.items()},
            self.distance / self.total,
        )
