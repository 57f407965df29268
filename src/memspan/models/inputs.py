"""Checks of the arguments that callers pass to a language model.

Only what is cheap to check is checked: types, shapes, devices and, on a CPU, the lengths of padded rows
and what memories count. A token outside the vocabulary is noticed by the embedding look-up, and
:func:`outside` then names it. On a GPU that look-up aborts the program with torch's own message:
checking first would wait for the GPU in every pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from memspan.devices import can_look
from memspan.errors import MemspanError, NonFiniteError, refuse_unknown
from memspan.memory import Memory
from memspan.models.segments import Padding
from memspan.nn import NOT_SCORED
from memspan.trees import check_field, check_kind, described, form, named, per_row, suits


def check_tokens(tokens: Tensor, targets: Tensor | None = None) -> None:
    """Refuse tokens that are not int64 ``[B, T]``, and targets that are not like them."""
    if not (isinstance(tokens, Tensor) and tokens.dtype == torch.int64 and tokens.dim() == 2):
        raise MemspanError(
            f"tokens must be an int64 tensor [rows, length], not {described(tokens)}"
        )
    _check("targets", targets, torch.int64, tokens.shape, tokens.device)


def check_vectors(
    x: Tensor,
    width: int,
    weight: Tensor,
    rows: int | None = None,
    starts: Tensor | None = None,
) -> None:
    """Validate vectors for a backbone of ``width`` D, or its reader of ``rows`` rows (None: any), with
    ``starts`` and ``lengths``. Arguments are as in :meth:`memspan.models.Backbone.forward`.

    ``weight``: one of the backbone's: its device is where everything must be, see also :func:`suits`.
    """
    if not (
        isinstance(x, Tensor)
        and len(shape := x.shape) == 3
        and (rows is None or rows == shape[0])
        and shape[2] == width
        and x.device == weight.device
        and suits(x, weight)
    ):
        raise _unreadable(x, f"[{'rows' if rows is None else rows}, length, {width}]", weight)
    _check("starts", starts, torch.bool, shape[:2], x.device)


def own_lengths(lengths: Tensor | list[int], x: Tensor, padding: Padding) -> Tensor:
    """``lengths`` as int64 ``[B]``; refused unless they fit the rows of ``x [B, T, ...]``."""
    refuse_unknown("padding", padding, Padding)
    if not isinstance(lengths, Tensor) or lengths.device == x.device:
        wanted = f"lengths must be integers [{x.shape[0]}], the tokens of each row"
        lengths = per_row(lengths, torch.int64, wanted, x.device)
        if len(lengths) != x.shape[0]:
            raise MemspanError(f"{wanted}, not {form(lengths)}")
    _check("lengths", lengths, torch.int64, x.shape[:1], x.device)
    if can_look(lengths) and ((lengths < 0) | (lengths > x.shape[1])).any():
        raise MemspanError(
            f"lengths must lie in 0 .. {x.shape[1]}, the tokens of a row, not "
            f"{lengths.min()} .. {lengths.max()}"
        )
    return lengths


def check_step(x: Tensor, width: int, weight: Tensor, rows: int) -> None:
    """Refuse anything but one vector for each of a reader's ``rows``, ``[B, D]``, and, where looking
    does not wait for the device, rows that are not finite: they would spoil their memory."""
    if not (
        isinstance(x, Tensor)
        and x.shape == (rows, width)
        and x.device == weight.device
        and suits(x, weight)
    ):
        raise _unreadable(x, f"[{rows}, {width}]", weight)
    refuse_not_finite(x)


def refuse_not_finite(x: Tensor) -> None:
    """Refuse vectors ``x [B, ...]`` that are not finite, where looking does not wait for the device."""
    if spoilt := rows_not_finite(x):
        raise NonFiniteError(
            f"the vectors of rows {spoilt} are not finite, so no row was read: put zeros there, reset "
            "these rows, and read again"
        )


def rows_not_finite(x: Tensor) -> str:
    """The numbers of the rows of ``x [B, ...]`` that are not finite, at most eight, for a message; none
    where looking would wait for the device."""
    if not can_look(x) or math.isfinite(x.sum(dtype=torch.float32).item()):
        return ""
    return listed(~x.isfinite().flatten(1).all(1))


def listed(mask: Tensor) -> str:
    """The numbers of the rows where ``mask [B]`` is true, at most eight, for a message."""
    rows: list[int] = mask.nonzero().flatten().tolist()
    return ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")


def _check(
    name: str, value: Tensor | None, dtype: torch.dtype, shape: torch.Size, device: torch.device
) -> None:
    if value is None:
        return
    if not (
        isinstance(value, Tensor)
        and value.dtype == dtype
        and value.shape == shape
        and value.device == device
    ):
        raise MemspanError(
            f"{name} must be a tensor of {named(dtype)} {list(shape)} on {device}, to go with the "
            f"input, not {described(value)}"
        )


def _unreadable(x: object, shape: str, weight: Tensor) -> MemspanError:
    kind = named(weight.dtype) if weight.is_floating_point() else "floating-point"
    return MemspanError(f"x must be a {kind} tensor {shape} on {weight.device}, not {described(x)}")


def check_memory(
    memory: Memory,
    kind: type[Memory],
    sizes: Mapping[str, tuple[int | None, ...]],
    device: torch.device,
) -> None:
    """Refuse a memory of another ``kind``, of other sizes or types, or on another device than the
    model's. Counts are looked at where that does not wait for the device.

    ``sizes``: of one row of its fields, see :meth:`memspan.models.Backbone.row_sizes`.
    """
    check_kind(memory, kind)
    rows = memory.tokens_seen.shape[:1]
    check_field("tokens_seen", memory.tokens_seen, torch.int64, rows or (None,), device)
    for name, size in sizes.items():
        dtype = torch.float32 if size else torch.int64
        check_field(name, getattr(memory, name), dtype, (*rows, *size), device)
    for name in memory.slots():
        check_field(name, getattr(memory, name), torch.int64, rows, device)
    if can_look(memory.tokens_seen):
        memory.counts()


def refuse_targets_outside(targets: Tensor, vocab_size: int) -> None:
    """Refuse targets outside the vocabulary, where looking does not wait for the device."""
    if can_look(targets) and _is_outside("target", targets, vocab_size).any():
        raise outside("target", targets, vocab_size)


def _is_outside(what: str, ids: Tensor, vocab_size: int) -> Tensor:
    wrong = (ids < 0) | (ids >= vocab_size)
    return wrong & (ids != NOT_SCORED) if what == "target" else wrong


def outside(what: str, ids: Tensor, vocab_size: int) -> MemspanError:
    """The error that names the first of ``ids [B, T]`` outside the vocabulary; there is one."""
    wrong = _is_outside(what, ids, vocab_size)
    also = f", or {NOT_SCORED} for a target that is not scored" if what == "target" else ""
    row, column = wrong.nonzero()[0].tolist()
    return MemspanError(
        f"{what} {int(ids[row, column])} in row {row}, column {column} is not in the vocabulary: "
        f"ids lie in 0 .. {vocab_size - 1}{also}"
    )
