"""What means the same in all architectures: feed-forward, sinusoids, dropout."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NOT_SCORED = -100
"""A target that is not scored: its loss is 0. torch's own label for it."""
NO_FLOAT64 = ("mps",)
"""Devices that have no float64: what needs it is computed on the CPU."""


def dropout_layer(probability: float) -> nn.Module:
    """Dropout, or nothing where the probability is 0: decoding is made of small calls."""
    return nn.Dropout(probability) if probability else nn.Identity()


PART = 1024
"""Rows that a processor is given at a time."""


def by_parts(f: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """``f(*rows)``, for ``rows [N, ...]`` that are independent of one another.

    On a CPU ``f`` is given a part of them at a time: what it makes on its way stays near the processor,
    and memory that nothing keeps serves again for the next part.
    """
    if rows[0].device.type != "cpu" or len(rows[0]) <= PART:
        return f(*rows)
    return torch.cat([f(*part) for part in zip(*(r.split(PART) for r in rows), strict=True)])


class FeedForward(nn.Module):
    """``W_2 f(W_1 x + b_1) + b_2`` (Vaswani et al. 2017, eq. 2)."""

    def __init__(self, d_model: int, d_ff: int, activation: str, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Linear(d_model, d_ff)
        self.outer = nn.Linear(d_ff, d_model)
        # In place: nobody else needs what the inner layer makes.
        self.activation = torch.relu_ if activation == "relu" else F.gelu
        self.dropout = dropout_layer(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., D] -> [..., D]``."""
        return by_parts(self._rows, x.reshape(-1, x.shape[-1])).view(x.shape)

    def _rows(self, x: Tensor) -> Tensor:
        # As one list of rows: what the inner layer makes is then no view, and on the way back nothing
        # is copied for what was done to it in place.
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
