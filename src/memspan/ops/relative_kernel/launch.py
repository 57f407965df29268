"""Launches the Triton programs of relative attention, and joins them for autograd.

The position term ``P = q Rᵀ + c`` and the gradients that come from it are products of torch's. ``u``
and ``v`` are folded into ``q`` and ``c``: see :mod:`memspan.ops.relative`. ``P`` and its gradient are
made for as many heads and rows at a time as keep a GPU busy, and ``P`` is computed again for the
backward pass: what lives at once grows with neither heads, rows nor queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

from memspan.ops.first_derivatives import apply, first_derivatives_only
from memspan.ops.limits import Limits
from memspan.ops.relative_kernel import kernel

PROGRAMS = 256
"""Programs of a launch that keep a GPU busy; an H100 has 132 processors."""


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
    wide = width > 64
    if dtype == torch.float32:
        return Plan(Tiles(16, 16 if wide else 32), Tiles(16, 16), Tiles(16, 32))
    if wide:
        return Plan(Tiles(64, 32, stages=1), Tiles(32, 32), Tiles(32, 32))
    return Plan(Tiles(64, 64), Tiles(32, 16), Tiles(32, 32))


class Shape(NamedTuple):
    """Sizes that all programs take."""

    n_rows: int
    n_heads: int
    n_queries: int
    n_keys: int
    width: int
    value_width: int

    @classmethod
    def of(cls, q: Tensor, v: Tensor) -> Shape:
        n_rows, n_heads, n_queries, width = q.shape
        return cls(n_rows, n_heads, n_queries, v.shape[2], width, v.shape[3])

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

    def grid(self, n: int, size: int) -> tuple[int]:
        """Programs that take ``size`` of ``n`` queries or keys each, of all heads and rows."""
        return (-(-n // size) * self.n_rows * self.n_heads,)

    def blocks(self, queries: int) -> Iterator[tuple[slice, slice]]:
        """Heads and rows of which ``P`` exists at once: some heads of all rows, or some rows of one."""
        at_once = -(-PROGRAMS // -(-self.n_queries // queries))
        n_heads = max(1, at_once // self.n_rows)
        n_rows = self.n_rows if at_once >= self.n_rows else at_once
        for head in range(0, self.n_heads, n_heads):
            for row in range(0, self.n_rows, n_rows):
                yield slice(head, head + n_heads), slice(row, row + n_rows)


def padded(width: int) -> int:
    """Columns of a tile for heads of this width: a power of two that a matrix product takes."""
    return max(16, 1 << (width - 1).bit_length())


class Inputs(NamedTuple):
    """Tensors of the operation, biases folded in."""

    q: Tensor
    """``[B, H, T, K]``, with contiguous rows, as ``k`` and ``v``."""
    k: Tensor
    """``[B, H, S, K]``."""
    v: Tensor
    """``[B, H, S, V]``."""
    keys: Tensor
    """``R``, ``[H, S + F, K]``."""
    scores: Tensor
    """``c``, ``[H, S + F]``."""
    limits: Limits
    """int32 ``[B or 1, T]``."""

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, scores: Tensor, *limits: Tensor
    ) -> Inputs:
        q, k, v = (with_rows(t) for t in (q, k, v))
        return cls(q, k, v, keys, scores, Limits(*limits).as_int32())

    def part(self, heads: slice, rows: slice) -> Inputs:
        """These heads of these rows."""
        q, k, v = (t[rows, heads] for t in self[:3])
        return Inputs(q, k, v, self.keys[heads], self.scores[heads], of_rows(self.limits, rows))

    def position_term(self) -> Tensor:
        """``P = q Rᵀ + c``, ``[H, B, T, S + F]``."""
        heads = self.q.transpose(0, 1).flatten(1, 2)
        term = torch.baddbmm(self.scores[:, None], heads, self.keys.transpose(1, 2))
        return term.unflatten(1, (self.q.shape[0], self.q.shape[2]))

    def tiles(self) -> Plan:
        return plan(self.q.dtype, max(self.q.shape[3], self.v.shape[3]))


def of_rows(limits: Limits, rows: slice) -> Limits:
    """Limits of some rows; those of one row hold for all."""
    return limits if len(limits.first) == 1 else Limits(limits.first[rows], limits.last[rows])


def forward(given: Inputs) -> tuple[Tensor, Tensor]:
    """Run :func:`kernel.forward`.

    Returns:
        The output ``[B, H, T, V]``, a view of heads before rows, and in float32 the totals
        ``[H, B, T]``.
    """
    shape = Shape.of(given.q, given.v)
    tiles = given.tiles().forward
    out = empty(given.q, shape.n_heads, shape.n_rows, shape.n_queries, shape.value_width)
    totals = empty(given.q, *out.shape[:3], dtype=torch.float32)
    with torch.cuda.device_of(given.q):
        for heads, rows in shape.blocks(tiles.queries):
            part = given.part(heads, rows)
            forward_programs(
                part, part.position_term(), out[heads, rows], totals[heads, rows], tiles
            )
    return out.transpose(0, 1), totals


def forward_programs(
    given: Inputs, by_distance: Tensor, out: Tensor, totals: Tensor, tiles: Tiles
) -> None:
    """Launch :func:`kernel.forward` for ``P``, to ``out [H, B, T, V]`` and ``totals [H, B, T]``."""
    q, k, v, _, _, limits = given
    shape = Shape.of(q, v)
    kernel.forward[shape.grid(shape.n_queries, tiles.queries)](
        q, k, v, by_distance, *limits, out, totals,
        *_strides(q, k, v), _step(limits.first),
        shape.n_rows, shape.n_queries, shape.n_keys, by_distance.shape[3],
        _scale(shape) * math.log2(math.e),
        **shape.constants(tiles, q.dtype),
    )  # fmt: skip


def backward(given: Inputs, out: Tensor, totals: Tensor, d_out: Tensor) -> tuple[Tensor, ...]:
    """Run :func:`kernel.backward_queries`, then :func:`kernel.backward_keys`.

    Args:
        out, totals: what :func:`forward` returned.
        d_out: ``[B, H, T, V]``.

    Returns:
        Gradients of ``q``, ``k``, ``v``, ``keys`` and ``scores``.
    """
    shape = Shape.of(given.q, given.v)
    tiles = given.tiles()
    d_out = with_rows(d_out)
    out = out.transpose(0, 1)
    n_heads = shape.n_heads
    found = Gradients(
        q=empty(given.q, n_heads, shape.n_rows, shape.n_queries, shape.width),
        k=empty(given.q, n_heads, shape.n_rows, shape.n_keys, shape.width),
        v=empty(given.q, n_heads, shape.n_rows, shape.n_keys, shape.value_width),
        # Sums over rows, which may be in several blocks.
        keys=torch.zeros_like(given.keys, dtype=torch.float32),
        scores=torch.zeros_like(given.scores, dtype=torch.float32),
    )
    with torch.cuda.device_of(given.q):
        for heads, rows in shape.blocks(tiles.forward.queries):
            block = (heads, rows)
            part = given.part(heads, rows)
            own = found.part(heads, rows)
            _add_gradients(part, out[block], totals[block], d_out[rows, heads], own, tiles)
    return (
        *(d.transpose(0, 1) for d in found[:3]),
        found.keys.to(given.keys.dtype),
        found.scores.to(given.scores.dtype),
    )


class Gradients(NamedTuple):
    """Gradients of :class:`Inputs`, heads before rows."""

    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    scores: Tensor

    def part(self, heads: slice, rows: slice) -> Gradients:
        """Gradients of some heads of some rows."""
        q, k, v = (d[heads, rows] for d in self[:3])
        return Gradients(q, k, v, self.keys[heads], self.scores[heads])


def _add_gradients(
    part: Inputs, out: Tensor, totals: Tensor, d_out: Tensor, found: Gradients, tiles: Plan
) -> None:
    """Write the gradients of a block, and add those that all rows share. ``P`` and its gradient live no
    longer."""
    d_term = backward_programs(part, part.position_term(), out, totals, d_out, found, tiles)
    d_term = d_term.flatten(1, 2)
    # A block of some rows has one head: its own part is contiguous in either case.
    d_q = found.q.view(*d_term.shape[:2], -1)
    d_q += torch.bmm(d_term, part.keys)
    heads = part.q.transpose(0, 1).flatten(1, 2)
    found.keys.add_(torch.bmm(d_term.transpose(1, 2), heads))
    found.scores.add_(d_term.sum(1, dtype=torch.float32))


def backward_programs(
    given: Inputs,
    by_distance: Tensor,
    out: Tensor,
    totals: Tensor,
    d_out: Tensor,
    found: Gradients,
    tiles: Plan,
) -> Tensor:
    """Launch both programs of the backward pass. They write the gradients of ``q`` (content's part
    alone), ``k`` and ``v``; that of ``P`` is returned."""
    q, k, v, _, _, limits = given
    shape = Shape.of(q, v)
    inner = empty(q, *totals.shape, dtype=torch.float32)
    # Distances that no key has, and keys that a query does not see, keep a gradient of zero.
    d_by_distance = empty(q, *by_distance.shape).zero_()
    sizes = (shape.n_rows, shape.n_queries, shape.n_keys, by_distance.shape[3])
    scales = (_scale(shape), _scale(shape) * math.log2(math.e))
    strides = (*_strides(q, k, v), _step(limits.first))

    kernel.backward_queries[shape.grid(shape.n_queries, tiles.backward_queries.queries)](
        q, k, v, by_distance, *limits, out, totals, d_out, found.q, d_by_distance, inner,
        *strides, *_strides(d_out), *sizes, *scales,
        **shape.constants(tiles.backward_queries, q.dtype),
    )  # fmt: skip
    begin_query = limits.begin_query(shape.n_keys)
    end_query = limits.end_query(shape.n_keys)
    kernel.backward_keys[shape.grid(shape.n_keys, tiles.backward_keys.keys)](
        q, k, v, by_distance, *limits, begin_query, end_query, totals, inner, d_out, found.k, found.v,
        *strides, _step(end_query), *_strides(d_out), *sizes, *scales,
        **shape.constants(tiles.backward_keys, q.dtype),
    )  # fmt: skip
    return d_by_distance


# ----- For autograd


class Attention(torch.autograd.Function):
    """Relative attention of ``(q, k, v, R, c, first, last)``, biases folded in.

    Saves the output and the totals. ``dR = dPᵀ q`` and ``dq += dP R`` are torch's products.
    """

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        out, totals = forward(Inputs.of(*given))
        ctx.save_for_backward(*given, out, totals)
        return out

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        *given, out, totals = ctx.saved_tensors
        return (*backward(Inputs.of(*given), out, totals, d_out), None, None)


@custom_op("memspan::relative_attention", mutates_args=())
def operation(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, scores: Tensor, first: Tensor, last: Tensor
) -> tuple[Tensor, Tensor]:
    """:class:`Attention` in a graph of ``torch.compile``; the totals, too."""
    return forward(Inputs.of(q, k, v, keys, scores, first, last))


@operation.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, scores: Tensor, first: Tensor, last: Tensor
) -> tuple[Tensor, Tensor]:
    n_rows, n_heads, n_queries, _ = q.shape
    out = q.new_empty(n_heads, n_rows, n_queries, v.shape[3])
    return out.transpose(0, 1), q.new_empty(out.shape[:3], dtype=torch.float32)


@custom_op("memspan::relative_attention_backward", mutates_args=())
def operation_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    scores: Tensor,
    first: Tensor,
    last: Tensor,
    out: Tensor,
    totals: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first five."""
    given = Inputs.of(q, k, v, keys, scores, first, last)
    d_q, d_k, d_v, d_keys, d_scores = backward(given, out, totals, d_out)
    return d_q, d_k, d_v, d_keys, d_scores


@operation_backward.register_fake
def _(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, scores: Tensor, *_: Tensor
) -> tuple[Tensor, ...]:
    heads_first = (t.new_empty(t.transpose(0, 1).shape).transpose(0, 1) for t in (q, k, v))
    return (*heads_first, keys.new_empty(keys.shape), scores.new_empty(scores.shape))


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _gradients(ctx: Any, d_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return (*operation_backward(d_out, *ctx.saved_tensors), None, None)


operation.register_autograd(_gradients, setup_context=_save)


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Storage for what a program writes; tests put storage with guarded margins in its place."""
    return like.new_empty(shape, dtype=dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, scores: Tensor, limits: Limits) -> Tensor:
    """Relative attention by the programs.

    Args:
        q: queries with ``u`` added, ``[B, H, T, K]``.
        k: ``[B, H, S, K]``, ``v``: ``[B, H, S, V]``.
        keys: ``R``, ``[H, S + F, K]``; ``scores``: ``c = (v - u) . R_d + S_d``, ``[H, S + F]``.
        limits: the keys that each query sees, none of them more than ``F`` in its future.

    Returns:
        ``[B, H, T, V]``.
    """
    given = (q, k, v, keys, scores, *limits)
    if torch.compiler.is_compiling():
        out: Tensor = operation(*given)[0]
    else:
        out = apply(Attention, *given)
    return out


def with_rows(t: Tensor) -> Tensor:
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
