"""Memories that are matrices: how much of a written value is read back later, and how full they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from memspan.measurement.span import histories
from memspan.measurement.subject import ROWS, SEED, Budget, RunSubject, after_history
from memspan.models.protocol import WriteRetention

MOST_ROUNDS = 32


@dataclass(frozen=True)
class RetentionLayer:
    """One layer's matrices."""

    kept: tuple[float, ...]
    """Share of a written value that its key still reads, by ``Retention.after``."""
    effective_rank: float
    """The exponential of the entropy of the singular values, mean over heads."""


@dataclass(frozen=True)
class Retention:
    """How well values that are written to matrices are kept."""

    values: int
    """Number of values in every layer and head."""
    after: tuple[int, ...]
    """Further tokens."""
    full_rank: int
    """The maximum of the effective rank."""
    layers: tuple[RetentionLayer, ...]


def exists(subject: RunSubject) -> bool:
    """Whether the architecture writes values to matrices."""
    return _found(subject, np.random.default_rng(SEED), 1, 1) is not None


def measured(subject: RunSubject, longest: int, budget: Budget) -> Iterator[Retention]:
    """Retention of values written after some history and read up to ``longest`` tokens later."""
    draws = np.random.default_rng(SEED)
    history = min(longest, len(subject.tokens) - longest - 2)
    after = [0, *histories(longest - 1)]
    kept: list[torch.Tensor] = []
    ranks: list[torch.Tensor] = []
    seconds = 0.0
    while len(kept) < MOST_ROUNDS and budget.left() > seconds:
        before = budget.spent()
        found = _found(subject, draws, max(1, history), longest)
        assert found is not None
        kept.append(found.kept[:, after].cpu())
        ranks.append(found.effective_rank.cpu())
        seconds = budget.spent() - before
        means = zip(
            torch.stack(kept).mean(0).tolist(), torch.stack(ranks).mean(0).tolist(), strict=True
        )
        layers = tuple(RetentionLayer(tuple(row), rank) for row, rank in means)
        yield Retention(len(kept) * ROWS, tuple(after), found.full_rank, layers)


def _found(
    subject: RunSubject, draws: np.random.Generator, history: int, n_tokens: int
) -> WriteRetention | None:
    x, memory = after_history(subject, draws, history, n_tokens)
    return subject.model.backbone.write_retention(x, memory)
