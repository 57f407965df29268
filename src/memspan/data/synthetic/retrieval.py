"""Associative retrieval (Schlag et al. 2021, section 6.1): pairs of key and value, then one query.

Capacity: as many pairs as keys, each key once. Updates: twice as many pairs as keys, drawn with
repetition; the last value of a key is the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memspan.checks import check_types
from memspan.errors import MemspanError


@dataclass(frozen=True)
class Batch:
    """Sequences of pairs, each with one query."""

    keys: Tensor
    """int64 ``[B, T]``, in ``0 .. n_keys - 1``."""
    values: Tensor
    """int64 ``[B, T]``, in the same range."""
    query: Tensor
    """The queried key, int64 ``[B]``."""
    answer: Tensor
    """The last value of that key, int64 ``[B]``."""


@dataclass(frozen=True)
class Retrieval:
    """Associative retrieval with ``n_keys`` keys, and as many values."""

    n_keys: int
    """Unique keys, the paper's S."""
    repeat: bool = False
    """Draw keys and values with repetition, for twice as many pairs."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.n_keys < 1:
            raise MemspanError(f"n_keys must be at least 1, not {self.n_keys}")

    @property
    def length(self) -> int:
        """Pairs of a sequence, T."""
        return self.n_keys * (2 if self.repeat else 1)

    def batch(self, batch_size: int, generator: torch.Generator) -> Batch:
        """Random sequences; each query is the key of a random pair."""
        keys, values = (self._draw(batch_size, generator) for _ in range(2))
        asked = torch.randint(self.length, (batch_size, 1), generator=generator)
        return self._with_answers(keys, values, keys.gather(1, asked)[:, 0])

    def every_query(self, generator: torch.Generator) -> Batch:
        """One random sequence, repeated to query each key in it."""
        keys, values = (self._draw(1, generator) for _ in range(2))
        query = keys.unique()
        rows = len(query)
        return self._with_answers(keys.expand(rows, -1), values.expand(rows, -1), query)

    def _draw(self, batch_size: int, generator: torch.Generator) -> Tensor:
        shape = (batch_size, self.length)
        if self.repeat:
            return torch.randint(self.n_keys, shape, generator=generator)
        return torch.rand(shape, generator=generator).argsort(1)

    def _with_answers(self, keys: Tensor, values: Tensor, query: Tensor) -> Batch:
        position = torch.arange(self.length)
        last = torch.where(keys == query[:, None], position, -1).argmax(1, keepdim=True)
        return Batch(keys, values, query, values.gather(1, last)[:, 0])
