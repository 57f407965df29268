"""A causal convolution of few taps, each channel by itself, that carries its last inputs along.

With weights ``w [C, W]`` and inputs ``x_t [C]``, those before the first token carried in::

    y_t = sum_(i < W) w[:, i] x_(t - W + 1 + i)

``w[:, -1]`` is the token's own. Gated DeltaNet (arXiv 2412.06464, section 3.4) has one on queries, keys
and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memspan.errors import MemspanError
from memspan.ops.first_derivatives import apply, first_derivatives_only
from memspan.ops.implementations import Implementation, check_shape, check_together, choose

CACHE_BYTES = 1 << 18
"""On a CPU, this many bytes of outputs are worked on at once."""


@dataclass(frozen=True)
class _Inputs:
    x: Tensor
    """The inputs carried in, then the segment's: ``[B, W - 1 + T, C]``."""
    weight: Tensor


def short_convolution(
    x: Tensor, weight: Tensor, before: Tensor, *, implementation: str | None = None
) -> tuple[Tensor, Tensor]:
    """Read ``T`` tokens; ``T`` may be shorter than the convolution.

    Args:
        x: ``[B, T, C]``.
        weight: ``[C, W]``, the token's own last.
        before: the last ``W - 1`` inputs, ``[B, W - 1, C]``, oldest first; zeros at a start.
        implementation: a name from :data:`IMPLEMENTATIONS`; None: the first.

    Returns:
        ``y [B, T, C]``, and the last ``W - 1`` inputs after the segment.

    Raises:
        MemspanError: shapes, types or devices do not go together; the implementation does not exist.
    """
    check_together(x=x, weight=weight, before=before)
    taps = weight.shape[-1] if weight.dim() == 2 else 0
    if not taps or x.dim() != 3 or x.shape[-1] != len(weight):
        raise MemspanError(
            f"a convolution's weights {[*weight.shape]} do not fit inputs {[*x.shape]}: pass [C, W] "
            "and [B, T, C]"
        )
    check_shape("before", before, "[B, W - 1, C]", x.shape[0], taps - 1, len(weight))
    inputs = _Inputs(torch.cat([before, x], 1), weight)
    y = choose(IMPLEMENTATIONS, implementation, inputs)(inputs)
    # A copy: a view would keep the whole segment.
    return y, inputs.x[:, x.shape[1] :].clone()


def _reference(inputs: _Inputs) -> Tensor:
    """Token by token, in plain autograd."""
    x, weight = inputs.x, inputs.weight
    taps = weight.shape[-1]
    windows = (x[:, t : t + taps] for t in range(x.shape[1] - taps + 1))
    outputs = [(window * weight.T).sum(1) for window in windows]
    return torch.stack(outputs, 1) if outputs else x[:, :0]


def _by_tap(inputs: _Inputs) -> Tensor:
    """One product per weight, all of a few tokens at a time."""
    y: Tensor = apply(_ByTap, inputs.x, inputs.weight)
    return y


class _ByTap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        taps = weight.T.contiguous()
        y = x.new_zeros(x.shape[0], x.shape[1] - len(taps) + 1, x.shape[2])
        for y_n, (part, tap) in _products(y, x, taps):
            y_n.addcmul_(part, tap)
        return y

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        taps = weight.T.contiguous()
        d_x, d_taps = torch.zeros_like(x), torch.zeros_like(taps)
        for d_y_n, (d_part, tap) in _products(d_y, d_x, taps):
            d_part.addcmul_(d_y_n, tap)
        for d_y_n, (part, d_tap) in _products(d_y, x, d_taps):
            d_tap.add_((part * d_y_n).sum((0, 1)))
        return d_x, d_taps.T


def _products(y: Tensor, x: Tensor, taps: Tensor) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
    """Views of ``y [B, T, C]``, of the part of ``x [B, W - 1 + T, C]`` for a tap, and the tap.

    On a CPU a few tokens at a time, so that they stay in cache for all taps.
    """
    length = y.shape[1]
    token = y.shape[0] * y.shape[2] * y.element_size()
    # Exports may leave the number of rows free.
    by_cache = y.device.type == "cpu" and isinstance(token, int)
    size = max(1, CACHE_BYTES // max(1, token)) if by_cache else length
    for start in range(0, length, size):
        end = min(start + size, length)
        for i, tap in enumerate(taps):
            yield y[:, start:end], (x[:, start + i : end + i], tap)


IMPLEMENTATIONS: dict[str, Implementation[_Inputs, Tensor]] = {
    "by-tap": Implementation(_by_tap),
    "reference": Implementation(_reference),
}
"""``by-tap``: a product of the segment per weight. ``reference``: plain autograd, token by token."""
