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
    sums: list[Tensor] = []
    seconds, tokens = 0.0, 0
    n_tokens = min(subject.segment_length, len(subject.tokens) - history - 1)
    while tokens < MOST_TOKENS and budget.left() > seconds:
        before = budget.spent()
        found = _weights(subject, draws, history, n_tokens)
        assert found is not None
        new = _sums(found)
        sums = [a + b for a, b in zip(sums, new, strict=True)] if sums else new
        tokens += len(found.layers[0]) * n_tokens
        seconds = budget.spent() - before
        by_distance, by_kind, distance = (each / sums[-1] for each in sums[:-1])
        n_bins = int(by_distance.sum(0).nonzero().max()) + 1
        layers = tuple(
            AttentionLayer(tuple(bins), dict(zip(found.kinds, kinds, strict=True)), mean)
            for bins, kinds, (mean,) in zip(
                by_distance[:, :n_bins].tolist(), by_kind.tolist(), distance.tolist(), strict=True
            )
        )
        yield Attention(tokens, (0, *(1 << i for i in range(n_bins - 1))), layers)


def _weights(
    subject: RunSubject, draws: np.random.Generator, history: int, n_tokens: int
) -> AttentionWeights | None:
    x, memory = after_history(subject, draws, history, n_tokens)
    return subject.model.backbone.attention_weights(x, memory)


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
