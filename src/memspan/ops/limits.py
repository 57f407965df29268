"""The keys that each query sees as two integers, in place of a mask."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Limits(NamedTuple):
    """The run of keys that each query sees: the past, a span, a memory's valid slots, a document."""

    first: Tensor
    """The first key, int32 or int64 ``[B or 1, T]``."""
    last: Tensor
    """The last key, in the same type and shape; less than the first: none."""

    @classmethod
    def of(cls, mask: Tensor) -> Limits:
        """Limits of a ``mask [B or 1, T, S]`` that is one run of keys per query."""
        first = mask.int().argmax(-1)
        return cls(first, first + mask.sum(-1) - 1)

    def mask(self, n_keys: int) -> Tensor:
        """The mask ``[B or 1, T, S]`` that these limits stand for."""
        keys = torch.arange(n_keys, device=self.first.device)
        return (keys >= self.first[..., None]) & (keys <= self.last[..., None])

    def as_int32(self) -> Limits:
        """int32 and contiguous, as the programs take them."""
        return Limits(self.first.int().contiguous(), self.last.int().contiguous())

    def begin_query(self, n_keys: int) -> Tensor:
        """The query before which none sees key ``j`` or a later one, int32 ``[B or 1, S]``."""
        # The largest last key of a query and all before it: it does not decrease.
        rising = self.last.cummax(1).values
        return torch.searchsorted(rising, self._keys(n_keys), out_int32=True)

    def end_query(self, n_keys: int) -> Tensor:
        """The query from which on none sees key ``j`` or an earlier one, int32 ``[B or 1, S]``."""
        # The least first key of a query and all after it: it does not decrease.
        rising = self.first.flip(1).cummin(1).values.flip(1).contiguous()
        return torch.searchsorted(rising, self._keys(n_keys), right=True, out_int32=True)

    def _keys(self, n_keys: int) -> Tensor:
        keys = torch.arange(n_keys, device=self.first.device, dtype=self.first.dtype)
        return keys.expand(len(self.first), -1).contiguous()
