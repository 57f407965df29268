"""Documents and padding inside a segment: what the architectures share.

``starts`` (bool ``[B, T]``) marks the first token of each document: that token and the later ones
of its row see nothing before it. ``lengths`` (int64 ``[B]``) counts a row's tokens; the rest of its
segment is padding, on the right or on the left. A row with padding reads exactly as it does alone.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Literal, TypeVar

import torch
from torch import Tensor

from memspan.memory import Memory
from memspan.models.output import BackboneOutput

M = TypeVar("M", bound=Memory)
Padding = Literal["right", "left"]


def move_left(x: Tensor, lengths: Tensor) -> Tensor:
    """Turn left padding into right padding: ``[B, T, ...] -> [B, T, ...]``.

    Each row is rotated, so that :func:`move_right` undoes it.
    """
    return _rotate(x, x.shape[1] - lengths)


def move_right(x: Tensor, lengths: Tensor) -> Tensor:
    """Turn right padding into left padding: the inverse of :func:`move_left`."""
    return _rotate(x, lengths)


def _rotate(x: Tensor, by: Tensor) -> Tensor:
    """Every row begins with its column ``by [B]``."""
    columns = torch.arange(x.shape[1], device=x.device) + by[:, None]
    columns = columns % max(x.shape[1], 1)
    return x.gather(1, columns.view(*columns.shape, *[1] * (x.dim() - 2)).expand_as(x))


def padding_mask(lengths: Tensor, n_tokens: int, padding: Padding = "right") -> Tensor:
    """Bool ``[B, T]``, true at a row's own tokens."""
    columns = torch.arange(n_tokens, device=lengths.device)
    if padding == "right":
        return columns < lengths[:, None]
    return columns >= n_tokens - lengths[:, None]


def read_in_pieces(
    read: Callable[[Tensor, M], BackboneOutput[M]],
    x: Tensor,
    memory: M,
    starts: Tensor | None,
    lengths: Tensor | None,
    padding: Padding = "right",
) -> BackboneOutput[M]:
    """Read a segment with documents and padding by a ``read`` that knows neither.

    For architectures whose results do not depend on how a text is cut: the segment is cut where any
    row's document starts, or where its padding starts or ends. Between two pieces rows are reset,
    and rows whose piece is padding keep the memory they had. The pieces are found on the CPU, which
    waits for the device once.

    Args:
        read: ``x [B, t, D]`` and a memory in, the output for them out.
        x: ``[B, T, D]``.
        memory: before the segment.
        starts: bool ``[B, T]``, or None.
        lengths: int64 ``[B]``, or None.
        padding: the side where rows shorter than the segment are padded.
    """
    rows, n_tokens = x.shape[:2]
    begins = x.new_zeros(rows, n_tokens, dtype=torch.bool) if starts is None else starts
    real = torch.ones_like(begins)
    if lengths is not None:
        real = padding_mask(lengths, n_tokens, padding)
    begins = (begins & real).cpu()
    real = real.cpu()
    cut = begins.any(0)
    cut[1:] |= (real[:, 1:] != real[:, :-1]).any(0)
    edges = sorted({0, *cut.nonzero().flatten().tolist(), n_tokens})
    outputs = []
    for start, end in pairwise(edges):
        if begins[:, start].any():
            memory = memory.reset(begins[:, start].to(x.device))
        output = read(x[:, start:end], memory)
        own = real[:, start]
        memory = output.memory if own.all() else output.memory.where(own.to(x.device), memory)
        outputs.append(output)
    hidden = torch.cat([output.hidden for output in outputs], 1)
    auxiliary_loss = torch.stack([output.auxiliary_loss for output in outputs]).sum()
    return BackboneOutput(hidden, memory, auxiliary_loss, outputs[-1].statistics)
