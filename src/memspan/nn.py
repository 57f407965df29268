"""Parts that architectures share: feed-forward sub-layer, attention, positions, dropout, slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from memspan.models.segments import Documents

NOT_SCORED = -100
"""The target of a token that is not scored: its loss is 0. PyTorch's own ``ignore_index``."""
NO_FLOAT64 = ("mps",)
"""Device types without float64, for which it is computed on the CPU."""


def dropout_layer(probability: float) -> nn.Module:
    """Dropout; an identity at probability 0, since decoding consists of many small calls."""
    return nn.Dropout(probability) if probability else nn.Identity()


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float = 0.0) -> Tensor:
    """``softmax(q k^T / sqrt(K)) v`` (Vaswani et al. 2017, eq. 1), ``[B, H, T, K]``: the reference of
    torch's ``scaled_dot_product_attention``. ``mask``: bool, ``[B or 1, H or 1, T or 1, S]``."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return F.dropout(scores.masked_fill(~mask, -torch.inf).softmax(-1), dropout) @ v


def in_use(width: int, count: Tensor) -> Tensor:
    """Bool ``[B, width]``: the right-most ``count [B]``, the slots that a memory of ``width`` uses."""
    return torch.arange(width, device=count.device) >= width - count[:, None]


def where_in_use(slots: Tensor, count: Tensor) -> Tensor:
    """``slots [B, ..., N, D]`` with zeros in those that are not :func:`in_use`."""
    used = in_use(slots.shape[-2], count)[..., None]
    return slots.where(used if slots.dim() == 3 else used[:, None], slots.new_zeros(()))


def newest(old: Tensor, x: Tensor, documents: Documents | None = None) -> Tensor:
    """The last ``M`` columns of ``old [B, M, D]`` and ``x [B, T, D]``, before each row's padding.

    Columns that are not among them are not copied: a pass keeps those of all layers until its end.
    """
    slots = old.shape[1]
    n_tokens = x.shape[1]
    if documents is not None:
        return documents.newest(torch.cat([old, x], 1), slots)
    if n_tokens < slots:
        return torch.cat([old[:, n_tokens:], x], 1)
    return x[:, n_tokens - slots :]


def count_after(count: Tensor, n_tokens: int, documents: Documents | None) -> Tensor:
    """Tokens or slots ``count [B]`` after a segment of ``n_tokens``.

    Where a document starts in it, those of the row's last document alone.
    """
    if documents is None:
        return count + n_tokens
    return documents.unless_fresh(count) + documents.n_last


def without_padding(x: Tensor, own: Tensor) -> Tensor:
    """``x [B, T, D]`` with zeros where ``own [B, T]`` is false.

    Padding may hold anything, NaN included, and a weight or gradient of 0 times NaN is NaN.
    """
    return x.masked_fill(~own[..., None], 0)


CHUNK = 1024
"""Rows per chunk on a CPU."""


def in_chunks(f: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """``f(*rows)``, where ``f`` maps each of the ``rows [N, ...]`` by itself.

    On a CPU it is called for one chunk of rows at a time: intermediates stay in cache, and buffers that
    autograd does not keep are reused.
    """
    count = rows[0].shape[0]
    # Exports may leave the number of rows free.
    if rows[0].device.type != "cpu" or not isinstance(count, int) or count <= CHUNK:
        return f(*rows)
    return torch.cat([f(*chunk) for chunk in zip(*(r.split(CHUNK) for r in rows), strict=True)])


class FeedForward(nn.Module):
    """``W_2 f(W_1 x + b_1) + b_2`` (Vaswani et al. 2017, eq. 2)."""

    def __init__(self, d_model: int, d_ff: int, activation: str, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Linear(d_model, d_ff)
        self.outer = nn.Linear(d_ff, d_model)
        # In place: nothing else uses the inner output.
        self.activation = torch.relu_ if activation == "relu" else F.gelu
        self.dropout = dropout_layer(dropout)

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        """``[..., D] -> [..., D]``. ``factor``: of dropout drawn beforehand, ``[..., F]``."""
        if factor is not None:
            inner = self.activation(self.inner(x))
            return self.outer(inner * factor.to(inner.dtype))  # type: ignore[no-any-return]
        return in_chunks(self._rows, x.reshape(-1, x.shape[-1])).view(x.shape)

    def _rows(self, x: Tensor) -> Tensor:
        # Flattened, so that the inner output is not a view and backward copies nothing.
        return self.outer(self.dropout(self.activation(self.inner(x))))


def sinusoids(positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """``[sin(p w), cos(p w)]`` concatenated, ``w_m = 10000^(-2m/width)``: ``[N] -> [N, width]``.

    Computed in float64: at 10,000 a float32 angle is off by a thousandth.
    """
    device = positions.device
    if device.type in NO_FLOAT64:
        positions = positions.cpu()
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width
    angles = positions.double()[:, None] * 10000.0**-exponents
    return torch.cat([angles.sin(), angles.cos()], -1).to(dtype).to(device)


def rotated(x: Tensor, codes: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021): each pair ``(x_i, x_{i + K/2})`` of ``x [B, H, T, K]`` turned
    by the angle of its position, whose sines and cosines are ``codes [T, K]``."""
    a, b = x.chunk(2, -1)
    sine, cosine = codes.to(x.dtype).chunk(2, -1)
    return torch.cat([a * cosine - b * sine, a * sine + b * cosine], -1)
