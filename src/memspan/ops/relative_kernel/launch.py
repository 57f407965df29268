"""Launches the Triton programs of relative attention, and joins them for autograd.

The position term ``P = q Rᵀ + c`` and the gradients that come from it are products of torch's. ``u``
and ``v`` are folded into ``q`` and ``c``: see :mod:`memspan.ops.relative`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import JITFunction

from memspan.ops.first_derivatives import apply, first_derivatives_only
from memspan.ops.relative_kernel import kernel


class Limits(NamedTuple):
    """Keys that each query sees, in place of a mask."""

    first: Tensor
    """The first key, int32 ``[B or 1, T]``."""
    last: Tensor
    """The last key, int32 ``[B or 1, T]``, not in the query's future; less than the first: none."""

    @classmethod
    def of(cls, mask: Tensor | None, like: Tensor, n_keys: int) -> Limits:
        """Limits of a ``mask [B or 1, T, S]`` that is one run of keys per query; None: of one query of
        ``like``'s device, which sees all keys."""
        if mask is None:
            first = torch.zeros(1, 1, dtype=torch.int32, device=like.device)
            return cls(first, first + (n_keys - 1))
        first = mask.int().argmax(-1)
        last = first + mask.sum(-1) - 1
        return cls(first.int(), last.int())

    def mask(self, n_keys: int) -> Tensor:
        """The mask ``[B or 1, T, S]`` that these limits stand for."""
        keys = torch.arange(n_keys, device=self.first.device)
        return (keys >= self.first[..., None]) & (keys <= self.last[..., None])

    def end_query(self, n_keys: int) -> Tensor:
        """The query from which on none sees key ``j``, int32 ``[B or 1, S]``."""
        # The least first key of a query and all after it: it does not decrease.
        rising = self.first.flip(1).cummin(1).values.flip(1).contiguous()
        keys = torch.arange(n_keys, device=rising.device, dtype=rising.dtype)
        keys = keys.expand(len(rising), -1).contiguous()
        return torch.searchsorted(rising, keys, right=True, out_int32=True)


class Tiles(NamedTuple):
    """Queries and keys that a program takes at once; warps and stages of its pipeline."""

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2


class Plan(NamedTuple):
    """Tiles of the three programs."""

    forward: Tiles
    backward_queries: Tiles
    backward_keys: Tiles


def plan(dtype: torch.dtype, width: int) -> Plan:
    """The default tiles for heads of this type and width, which spill on no target tried."""
    if dtype == torch.float32:
        return Plan(Tiles(16, 32), Tiles(16, 16), Tiles(16, 32))
    return Plan(Tiles(64, 64 if width <= 64 else 32), Tiles(32, 32), Tiles(32, 32))


class Shape(NamedTuple):
    """Sizes that all programs take."""

    batch: int
    n_heads: int
    n_queries: int
    n_keys: int
    width: int
    value_width: int

    @classmethod
    def of(cls, q: Tensor, v: Tensor) -> Shape:
        batch, n_heads, n_queries, width = q.shape
        return cls(batch, n_heads, n_queries, v.shape[2], width, v.shape[3])

    def constants(self, tiles: Tiles, dtype: torch.dtype) -> dict[str, Any]:
        """Arguments of a program that are compiled into it, and the options of its compilation."""
        exact = torch.get_float32_matmul_precision() == "highest"
        return {
            "WIDTH": self.width,
            "VALUE_WIDTH": self.value_width,
            "COLUMNS": padded(self.width),
            "VALUE_COLUMNS": padded(self.value_width),
            "QUERIES": tiles.queries,
            "KEYS": tiles.keys,
            "PRECISION": "ieee" if exact or dtype != torch.float32 else "tf32",
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
        }


def padded(width: int) -> int:
    """Columns of a tile for heads of this width: a power of two that a matrix product takes."""
    return max(16, 1 << (width - 1).bit_length())


def forward(
    q: Tensor, k: Tensor, v: Tensor, by_distance: Tensor, limits: Limits, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """Run :func:`kernel.forward`.

    Args:
        q: ``[B, H, T, K]``, ``k``: ``[B, H, S, K]``, ``v``: ``[B, H, S, V]``, in one type, with
            contiguous rows.
        by_distance: ``P``, ``[B, H, T, S]``, with contiguous rows.

    Returns:
        The output ``[B, H, T, V]`` and the totals ``[B, H, T]`` in float32.
    """
    shape = Shape.of(q, v)
    out = empty(q, *q.shape[:3], shape.value_width)
    totals = empty(q, *q.shape[:3], dtype=torch.float32)
    grid = (_parts(shape.n_queries, tiles.queries) * shape.batch * shape.n_heads,)
    kernel.forward[grid](
        q, k, v, by_distance, *limits, out, totals,
        *_strides(q, k, v, by_distance), _step(limits.first),
        shape.n_heads, shape.n_queries, shape.n_keys, _scale(shape) * math.log2(math.e),
        **shape.constants(tiles, q.dtype),
    )  # fmt: skip
    return out, totals


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    by_distance: Tensor,
    limits: Limits,
    out: Tensor,
    totals: Tensor,
    d_out: Tensor,
    tiles: Plan,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run :func:`kernel.backward_queries`, then :func:`kernel.backward_keys`.

    Args:
        out, totals: what :func:`forward` returned.
        d_out: ``[B, H, T, V]``, with contiguous rows.

    Returns:
        Gradients of ``q`` (content's part alone), ``k``, ``v`` and ``by_distance``, the last as a view
        of heads before rows.
    """
    shape = Shape.of(q, v)
    pairs = shape.batch * shape.n_heads
    d_q = empty(q, *q.shape)
    d_k = empty(q, *k.shape)
    d_v = empty(q, *v.shape)
    inner = empty(q, *q.shape[:3], dtype=torch.float32)
    # Distances that no key has, and keys that a query does not see, keep a gradient of zero.
    d_by_distance = empty(q, shape.n_heads, shape.batch, *by_distance.shape[2:]).zero_()
    d_by_distance = d_by_distance.transpose(0, 1)
    sizes = (shape.n_heads, shape.n_queries, shape.n_keys)
    scales = (_scale(shape), _scale(shape) * math.log2(math.e))
    strides = (*_strides(q, k, v, by_distance), _step(limits.first))

    grid = (_parts(shape.n_queries, tiles.backward_queries.queries) * pairs,)
    kernel.backward_queries[grid](
        q, k, v, by_distance, *limits, out, totals, d_out, d_q, d_by_distance, inner,
        *strides, *_strides(d_out, d_by_distance), *sizes, *scales,
        **shape.constants(tiles.backward_queries, q.dtype),
    )  # fmt: skip
    end_query = limits.end_query(shape.n_keys)
    grid = (_parts(shape.n_keys, tiles.backward_keys.keys) * pairs,)
    kernel.backward_keys[grid](
        q, k, v, by_distance, *limits, end_query, totals, inner, d_out, d_k, d_v,
        *strides, *_strides(d_out), _step(end_query), *sizes, *scales,
        **shape.constants(tiles.backward_keys, q.dtype),
    )  # fmt: skip
    return d_q, d_k, d_v, d_by_distance


class Attention(torch.autograd.Function):
    """Relative attention of ``(q, k, v, R, c, first, last)``, biases folded in.

    Saves ``P``, the output and the totals. ``dR = dPᵀ q`` and ``dq += dP R`` are torch's products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keys: Tensor,
        scores: Tensor,
        first: Tensor,
        last: Tensor,
    ) -> Tensor:
        limits = Limits(first, last)
        q, k, v = (_with_rows(t) for t in (q, k, v))
        by_distance = position_term(q, keys, scores)
        tiles = plan(q.dtype, max(q.shape[3], v.shape[3]))
        with torch.cuda.device_of(q):
            out, totals = forward(q, k, v, by_distance, limits, tiles.forward)
        ctx.save_for_backward(q, k, v, keys, by_distance, first, last, out, totals)
        return out

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, keys, by_distance, first, last, out, totals = ctx.saved_tensors
        tiles = plan(q.dtype, max(q.shape[3], v.shape[3]))
        limits = Limits(first, last)
        d_out = _with_rows(d_out)
        with torch.cuda.device_of(q):
            d_q, d_k, d_v, d_p = backward(q, k, v, by_distance, limits, out, totals, d_out, tiles)
        d_p = d_p.transpose(0, 1).flatten(1, 2)
        heads = q.transpose(0, 1).flatten(1, 2)
        position = torch.bmm(d_p, keys).unflatten(1, (q.shape[0], q.shape[2])).transpose(0, 1)
        d_keys = torch.bmm(d_p.transpose(1, 2), heads) if ctx.needs_input_grad[3] else None
        d_scores = d_p.sum(1) if ctx.needs_input_grad[4] else None
        return d_q + position, d_k, d_v, d_keys, d_scores, None, None


def position_term(q: Tensor, keys: Tensor, scores: Tensor) -> Tensor:
    """``P = q Rᵀ + c``, ``[B, H, T, S]``, as a view of heads before rows."""
    heads = q.transpose(0, 1).flatten(1, 2)
    by_distance = torch.baddbmm(scores[:, None], heads, keys.transpose(1, 2))
    return by_distance.unflatten(1, (q.shape[0], q.shape[2])).transpose(0, 1)


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Storage for what a program writes; tests put storage with guarded margins in its place."""
    return like.new_empty(shape, dtype=dtype)


def attend(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, scores: Tensor, mask: Tensor | None
) -> Tensor:
    """Relative attention by the programs.

    Args:
        q: queries with ``u`` added, ``[B, H, T, K]``.
        k: ``[B, H, S, K]``, ``v``: ``[B, H, S, V]``.
        keys: ``R``, ``[H, S, K]``; ``scores``: ``c = (v - u) . R_d + S_d``, ``[H, S]``.
        mask: bool ``[B or 1, T, S]``, one run of keys for each query, none of them in its future.

    Returns:
        ``[B, H, T, V]``.
    """
    out: Tensor = apply(Attention, q, k, v, keys, scores, *Limits.of(mask, q, k.shape[2]))
    return out


def interpreted() -> bool:
    """True if Triton was imported with ``TRITON_INTERPRET=1``: programs then run on a CPU, slowly."""
    return not isinstance(kernel.forward, JITFunction)


def _with_rows(t: Tensor) -> Tensor:
    """``t`` with contiguous rows."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Strides of the batch, the heads and the rows, of one tensor after another."""
    return tuple(stride for t in tensors for stride in t.stride()[:3])


def _step(t: Tensor) -> int:
    """From one row of the batch to the next; 0 if all share one."""
    return t.stride(0) if len(t) > 1 else 0


def _scale(shape: Shape) -> float:
    return shape.width**-0.5


def _parts(n: int, size: int) -> int:
    return -(-n // size)
