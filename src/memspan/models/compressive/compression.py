"""The Compressive Transformer's second memory (Rae et al. 2019, arXiv 1911.05507, section 3).

A row's slots are ``[compressed | memory]``, oldest first. Tokens are appended to the memory; when it
then holds ``m > M`` slots, its oldest ``n * c`` with ``n = ceil((m - M) / c)`` become ``n`` compressed
slots, of which the newest ``C`` remain. After ``N`` tokens memory holds ``N - c * ceil((N - M) / c)``
slots: the layout depends on ``N`` alone, however the tokens were cut.

Tensors have fixed sizes, slots are right-aligned, and a count per row gives the slots in use: rows may
have read different numbers of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from memspan.nn import attention
from memspan.ops.first_derivatives import sdpa
from memspan.ops.relative import sdpa_is_fast

# ----- Layout


@dataclass(frozen=True)
class Append:
    """Effect of appending ``T`` tokens on each row: numbers of slots, int64 ``[B]``."""

    total: Tensor
    """Slots with the new tokens, before compression."""
    n_compressed: Tensor
    """Runs that are compressed, at most ``ceil(T / c)``."""
    length: Tensor
    """Slots that remain in the memory."""
    compressed_length: Tensor
    """Compressed slots that remain."""


def append(
    length: Tensor,
    compressed_length: Tensor,
    n_tokens: int | Tensor,
    slots: int,
    compressed_slots: int,
    rate: int,
) -> Append:
    """Count slots after ``n_tokens`` more.

    Args:
        length: slots of memory in use, int64 ``[B]``; ``compressed_length``: compressed slots in use.
        n_tokens: T, or each row's number, int64 ``[B]``.
        slots: room for memory, M, at least ``rate - 1``.
        compressed_slots: room for compressed slots, C.
        rate: slots that are compressed into one, c.
    """
    total = length + n_tokens
    n = (total - slots + rate - 1).div(rate, rounding_mode="floor").clamp(min=0)
    return Append(total, n, total - n * rate, (compressed_length + n).clamp(max=compressed_slots))


def newest(width: int, end: int, count: Tensor, older_end: int | Tensor) -> Tensor:
    """Columns of each row's ``width`` newest slots out of two ranges, int64 ``[B, width]``.

    The newest ``count [B]`` slots end before column ``end``, the older ones before column
    ``older_end`` (an int, or int64 ``[B]``). Slots that a row does not have point to any column.
    """
    back = torch.arange(width - 1, -1, -1, device=count.device)
    older = (older_end + count)[:, None]
    return torch.where(back < count[:, None], end, older).sub(1 + back).clamp(min=0)


def pick(x: Tensor, columns: Tensor) -> Tensor:
    """``x[b, columns[b]]``: ``[B, N, ...]`` and int64 ``[B, n]`` give ``[B, n, ...]``."""
    first = torch.arange(x.shape[0], device=x.device)[:, None] * x.shape[1]
    return x.flatten(0, 1).index_select(0, (first + columns).flatten()).unflatten(0, columns.shape)


# ----- Compression functions f_c: [B, n*c, D] -> [B, n, D]


def mean_pooling(x: Tensor, rate: int) -> Tensor:
    """The mean of each run of ``rate`` slots."""
    return x.unflatten(1, (-1, rate)).mean(2)


def max_pooling(x: Tensor, rate: int) -> Tensor:
    """The largest entry of each run, feature by feature."""
    return x.unflatten(1, (-1, rate)).amax(2)


def convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """1-D convolution whose kernel and stride are the rate, as one product.

    Args:
        weight: ``[D, D, c]``: output, input, position within the run, as in ``torch.nn.Conv1d``.
        bias: ``[D]``.
    """
    rate = weight.shape[2]
    runs = x.reshape(x.shape[0], x.shape[1] // rate, rate * x.shape[2])
    return F.linear(runs, weight.transpose(1, 2).flatten(1), bias)


def dilated_convolution(x: Tensor, weights: Tensor, biases: Tensor, rate: int) -> Tensor:
    """A stack of convolutions of kernel 2 with dilations 1, 2, 4, ..., ReLU between, within each run.

    Only what the last position of a run depends on is computed: a tree, whose level ``i`` joins
    positions ``2^i`` apart. A run whose length is not a power of two is padded with zeros in front.

    Args:
        weights: ``[levels, D, D, 2]``, ``levels = ceil(log2 c)``; ``biases``: ``[levels, D]``.
    """
    tree = F.pad(x.unflatten(1, (-1, rate)), (0, 0, 2 ** len(weights) - rate, 0))
    for level, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        if level:
            tree = F.relu(tree)
        pairs = tree.unflatten(2, (-1, 2)).flatten(3)
        tree = F.linear(pairs, weight.transpose(1, 2).flatten(1), bias)
    return tree.squeeze(2)


def most_used(x: Tensor, received: Tensor, rate: int) -> Tensor:
    """The slot of each run that received most attention, ``received [B, n*c]``.

    NaN if any attention in the run is NaN.
    """
    most, best = received.unflatten(1, (-1, rate)).max(-1)
    picked = pick(x, best + torch.arange(best.shape[1], device=best.device) * rate)
    return picked.masked_fill(most.isnan()[..., None], torch.nan)


# ----- Auxiliary losses


def attention_reconstruction(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    compressed_k: Tensor,
    compressed_v: Tensor,
    valid: Tensor,
    queries: Tensor | None = None,
    *,
    implementation: str | None = None,
) -> Tensor:
    """``|| attn(h, old) - attn(h, f_c(old)) ||^2`` (algorithm 2): content only, no positions, no mask.

    Averaged over elements, and over the rows that compressed anything.

    Args:
        q: queries of the segment, ``[B, H, T, K]``.
        k: keys of the slots before compression, ``[B, H, n*c, K]``; ``v``: their values.
        compressed_k: keys of the compressed slots, ``[B, H, n, K]``; ``compressed_v``: their values.
        valid: bool ``[B, n]``, the runs that count.
        queries: bool ``[B, T]``, those of them that count (None: all).
        implementation: ``reference``: plain autograd, for double backward; ``sdpa``: torch's
            attention; any other, or None: torch's where it is fast.
    """
    torchs = implementation == "sdpa" or (implementation != "reference" and sdpa_is_fast(q))
    attend = sdpa if torchs else attention
    some = valid.any(1)
    # A row without any attends to everything, and its error is dropped: all -inf would give NaN.
    attended = valid | ~some[:, None]
    rate = k.shape[2] // valid.shape[1]
    with torch.no_grad():
        mask = attended.repeat_interleave(rate, 1)[:, None, None]
        target = attend(q, k, v, mask)
    found = attend(q, compressed_k, compressed_v, attended[:, None, None])
    # Under autocast both are bfloat16: too coarse for a mean of small differences.
    exact = torch.promote_types(found.dtype, torch.float32)
    error = (found.to(exact) - target.to(exact)).square().mean((1, 3))
    if queries is None:
        error = error.mean(1)
    else:
        error = error.where(queries, 0).sum(1) / queries.sum(1).clamp(min=1)
    return (error * some).sum() / some.sum().clamp(min=1)


def auto_encoding(
    x: Tensor, compressed: Tensor, weight: Tensor, bias: Tensor, valid: Tensor
) -> Tensor:
    """``|| old - g(f_c(old)) ||^2`` with ``g`` a transposed convolution, averaged over elements.

    Args:
        x: what was compressed, ``[B, n*c, D]``.
        compressed: ``[B, n, D]``.
        weight: ``[D, D, c]``: input, output, position in the run, as in ``torch.nn.ConvTranspose1d``.
        bias: ``[D]``.
        valid: bool ``[B, n]``, the runs that count.
    """
    rate = weight.shape[2]
    decoded = (compressed @ weight.transpose(1, 2).flatten(1)).unflatten(2, (rate, -1)) + bias
    error = (decoded - x.unflatten(1, (-1, rate))).square().mean((2, 3))
    return (error * valid).sum() / valid.sum().clamp(min=1)
