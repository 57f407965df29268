"""Texts that are read in blocks of ``S`` tokens, wherever they are cut: shared by RMT and
Infini-attention.

Between segments a memory keeps what is needed of a row's block that is not full, in ``S - 1`` slots,
the newest right-most. Blocks of different rows may be at different places.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memspan.devices import can_look


def slots_in_use(length: Tensor, size: int) -> int:
    """Slots that any row uses, where ``length [B]`` tokens of its block were read: others are not worth
    reading. All ``size - 1`` where to look would wait for another device."""
    if can_look(length) and len(length):
        return int(length.max())
    return size - 1


def from_block_start(x: Tensor, length: Tensor, size: int) -> Tensor:
    """Each row of ``x [B, S - 1 + T, D]``, the slots and a segment, from its block's first token on:
    ``[B, N, D]``, with as many as the longest has. At the end a shorter one repeats its last.

    Args:
        length: tokens of its block in each row's slots, ``[B]``.
        size: ``S``.
    """
    first = size - 1 - length
    n_columns = x.shape[1] - (size - 1) + slots_in_use(length, size)
    column = torch.arange(n_columns, device=x.device) + first[:, None]
    return columns_of(x, column.clamp(max=x.shape[1] - 1))


def columns_of(x: Tensor, columns: Tensor) -> Tensor:
    """The ``columns [B, N]`` of ``x [B, T, D]``: ``[B, N, D]``."""
    return x.gather(1, columns[..., None].expand(-1, -1, x.shape[2]))
