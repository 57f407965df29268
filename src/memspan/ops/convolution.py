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
import torch.nn.functional as F
from torch import Tensor

from memspan.errors import MemspanError
from memspan.ops.first_derivatives import apply, first_derivatives_only
from memspan.ops.implementations import (
    Implementation,
    check_rows,
    check_shape,
    check_together,
    choose,
)

CACHE_BYTES = 1 << 18
"""On a CPU, this many bytes of outputs are worked on at once."""


@dataclass(frozen=True)
class _Inputs:
    x: Tensor
    """The inputs carried in, then the segment's: ``[B, W - 1 + T, C]``."""
    weight: Tensor
    document: Tensor | None
    """The document of each input, int64 ``[B, W - 1 + T]`` (None: all are of one)."""


def short_convolution(
    x: Tensor,
    weight: Tensor,
    before: Tensor,
    *,
    implementation: str | None = None,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Read ``T`` tokens; ``T`` may be shorter than the convolution.

    Args:
        x: ``[B, T, C]``.
        weight: ``[C, W]``, the token's own last.
        before: the last ``W - 1`` inputs, ``[B, W - 1, C]``, oldest first; zeros at a start.
        implementation: a name from :data:`IMPLEMENTATIONS`; None: the first.
        starts: bool ``[B, T]``: from there on inputs before it count as zero (None: nowhere).
        lengths: int64 ``[B]``, tokens of each row: padding after them is not carried (None: there is
            none).

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
    check_rows("starts", starts, torch.bool, "[B, T]", x.device, *x.shape[:2])
    check_rows("lengths", lengths, torch.int64, "[B]", x.device, x.shape[0])
    document = None if starts is None else F.pad(starts.cumsum(1), (taps - 1, 0))
    inputs = _Inputs(torch.cat([before, x], 1), weight, document)
    y = choose(IMPLEMENTATIONS, implementation, inputs)(inputs)
    return y, _carried(inputs, x.shape[1], lengths)


def _carried(inputs: _Inputs, n_tokens: int, lengths: Tensor | None) -> Tensor:
    """The last ``W - 1`` inputs, zero before the last document's first: a copy, as a view would keep
    the whole segment."""
    x = inputs.x
    document = inputs.document
    n_carried = x.shape[1] - n_tokens
    if not n_carried or (lengths is None and document is None):
        return x[:, n_tokens:].clone()
    column = torch.arange(n_carried, device=x.device)
    first = x.new_full((len(x),), n_tokens, dtype=torch.int64) if lengths is None else lengths
    column = first[:, None] + column
    carried = x.gather(1, column[..., None].expand(-1, -1, x.shape[2]))
    if document is None:
        return carried
    last = document.gather(1, first[:, None] + n_carried - 1)
    return carried.masked_fill((document.gather(1, column) != last)[..., None], 0)


def _reference(inputs: _Inputs) -> Tensor:
    """Token by token, in plain autograd."""
    x = inputs.x
    weight = inputs.weight
    document = inputs.document
    taps = weight.shape[-1]
    outputs = []
    for t in range(x.shape[1] - taps + 1):
        window = x[:, t : t + taps]
        if document is not None:
            of_window = document[:, t : t + taps]
            window = window.masked_fill((of_window != of_window[:, -1:])[..., None], 0)
        outputs.append((window * weight.T).sum(1))
    return torch.stack(outputs, 1) if outputs else x[:, :0]


def _by_tap(inputs: _Inputs) -> Tensor:
    """One product per weight, all of a few tokens at a time."""
    y: Tensor = apply(_ByTap, inputs.x, inputs.weight, inputs.document)
    return y


class _ByTap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, document: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, document)
        taps = weight.T.contiguous()
        y = x.new_zeros(x.shape[0], x.shape[1] - len(taps) + 1, x.shape[2])
        for y_n, (part, tap), other in _products(y, x, taps, document):
            y_n.addcmul_(_without(part, other), tap)
        return y

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, document = ctx.saved_tensors
        taps = weight.T.contiguous()
        d_x = torch.zeros_like(x)
        d_taps = torch.zeros_like(taps)
        for d_y_n, (d_part, tap), other in _products(d_y, d_x, taps, document):
            d_part.addcmul_(_without(d_y_n, other), tap)
        for d_y_n, (part, d_tap), other in _products(d_y, x, d_taps, document):
            d_tap.add_((_without(part, other) * d_y_n).sum((0, 1)))
        return d_x, d_taps.T, None


def _without(x: Tensor, other: Tensor | None) -> Tensor:
    """``x [B, n, C]`` with zeros where ``other [B, n, 1]`` is true; not a product, which keeps NaN."""
    return x if other is None else x.masked_fill(other, 0)


def _products(
    y: Tensor, x: Tensor, taps: Tensor, document: Tensor | None
) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor], Tensor | None]]:
    """Views of ``y [B, T, C]``; of the part of ``x [B, W - 1 + T, C]`` for a tap, and the tap; and bool
    ``[B, n, 1]``, true where the part is of another document than the output (None: nowhere).

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
            other = None
            before = len(taps) - 1
            if document is not None and i < before:
                of_output = document[:, start + before : end + before]
                other = (document[:, start + i : end + i] != of_output)[..., None]
            yield y[:, start:end], (x[:, start + i : end + i], tap), other


IMPLEMENTATIONS: dict[str, Implementation[_Inputs, Tensor]] = {
    "by-tap": Implementation(_by_tap),
    "reference": Implementation(_reference),
}
"""``by-tap``: a product of the segment per weight. ``reference``: plain autograd, token by token."""
