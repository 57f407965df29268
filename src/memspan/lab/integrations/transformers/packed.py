"""Documents packed one after another into a row, as trainers' collators say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from memspan.errors import MemspanError

BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments that collators give besides ``position_ids``; the first and the last say all."""


def bounds_in(given: dict[str, Any]) -> dict[str, Any]:
    """Take :data:`BOUNDS` out of the keyword arguments ``given``."""
    return {name: given.pop(name, None) for name in BOUNDS}


def document_starts(
    own: Tensor, position_ids: Tensor | None, bounds: Mapping[str, Any]
) -> Tensor | None:
    """Find where documents begin after others in their rows.

    Args:
        own: bool ``[B, T]``, false at padding.
        position_ids: ``[B, T]``, ``[1, T]`` or ``[T]``, which begin anew with each document.
        bounds: those of :data:`BOUNDS` that were given: ``cu_seq_lens_q``, int32 ``[N + 1]``, columns
            of all rows one after another, or ``seq_idx [B, T]``, a document's number.

    Returns:
        bool ``[B, T]``; None if each row is one text.

    Raises:
        MemspanError: a shape is wrong, positions neither rise by one nor begin anew, or two of the
            three say something else.
    """
    found = []
    if position_ids is not None:
        found.append(_by_positions(position_ids, own))
    if (offsets := bounds.get("cu_seq_lens_q")) is not None:
        found.append(_by_offsets(offsets, own))
    if (numbers := bounds.get("seq_idx")) is not None:
        found.append(_by_numbers(numbers, own))
    # A row's first token begins one in any case, if nothing was read before.
    later = own & (own.cumsum(1) > 1)
    found = [starts & later for starts in found]
    if any(not starts.equal(found[0]) for starts in found):
        raise MemspanError(
            "position_ids, cu_seq_lens_q and seq_idx begin documents at different tokens: give one of "
            "them"
        )
    return found[0] if found and found[0].any() else None


def _by_positions(position_ids: Tensor, own: Tensor) -> Tensor:
    """True where positions begin anew, at 0 or at the row's first."""
    rows, n_columns = own.shape
    if position_ids.shape not in ((n_columns,), (1, n_columns), (rows, n_columns)):
        raise MemspanError(
            f"position_ids must be [{rows}, {n_columns}], as the input, not "
            f"{list(position_ids.shape)}: leave them out"
        )
    # All padding to the right, so that each token is beside the one before it.
    order = (~own).to(torch.uint8).argsort(dim=1, stable=True)
    positions = position_ids.expand(rows, n_columns).gather(1, order)
    others = positions[:, 1:]
    anew = (others - positions[:, :-1] != 1) & own.gather(1, order)[:, 1:]
    if (anew & (others != 0) & (others != positions[:, :1])).any():
        raise MemspanError(
            "position_ids must rise by one from token to token, or begin anew with a document: leave "
            "them out where a row is one text"
        )
    return torch.zeros_like(own).scatter(1, order[:, 1:], anew)


def _by_offsets(offsets: Tensor, own: Tensor) -> Tensor:
    if offsets.dim() != 1 or (
        len(offsets) and not 0 <= int(offsets.min()) <= int(offsets.max()) <= own.numel()
    ):
        raise MemspanError(
            f"cu_seq_lens_q must be offsets from 0 to {own.numel()}, the number of tokens"
        )
    starts = own.new_zeros(own.numel() + 1)
    starts[offsets.long()] = True
    return starts[:-1].view_as(own)


def _by_numbers(numbers: Tensor, own: Tensor) -> Tensor:
    if numbers.shape != own.shape:
        raise MemspanError(
            f"seq_idx must be {list(own.shape)}, as the input, not {list(numbers.shape)}"
        )
    starts = torch.zeros_like(own)
    starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return starts
