"""Checks of the arguments that callers pass to a language model.

Only what is cheap to check is checked: types, shapes and, on a CPU, the lengths of padded rows. A token
outside the vocabulary is noticed by the embedding look-up, and :func:`outside` then names it. On a GPU
that look-up aborts the program with torch's own message: checking first would wait for the GPU in every
pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memspan.errors import MemspanError, refuse_unknown
from memspan.memory import Memory
from memspan.models.segments import Padding
from memspan.nn import NOT_SCORED


def check_segment(
    tokens: Tensor,
    targets: Tensor | None = None,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    padding: Padding = "right",
) -> None:
    """Refuse arguments that are not as :meth:`memspan.models.LanguageModel.forward` describes them."""
    if not (isinstance(tokens, Tensor) and tokens.dtype == torch.int64 and tokens.dim() == 2):
        raise MemspanError(
            f"tokens must be an int64 tensor [rows, length], not {_described(tokens)}"
        )
    _check("targets", targets, torch.int64, tokens.shape)
    _check("starts", starts, torch.bool, tokens.shape)
    if lengths is not None:
        _check("lengths", lengths, torch.int64, tokens.shape[:1])
        refuse_unknown("padding", padding, Padding)
        if lengths.device.type == "cpu" and not torch.compiler.is_compiling():
            n_tokens = tokens.shape[1]
            if ((lengths < 0) | (lengths > n_tokens)).any():
                raise MemspanError(
                    f"lengths must lie in 0 .. {n_tokens}, the tokens of a row, not "
                    f"{lengths.min()} .. {lengths.max()}"
                )


def check_vectors(
    x: Tensor, starts: Tensor | None, rows: int, width: int, device: torch.device
) -> None:
    """Refuse what a reader of vectors cannot read: anything but floating-point ``[B, T, D]``, with its
    ``rows`` B and ``width`` D, on its device, and ``starts`` ``[B, T]``."""
    if not (
        isinstance(x, Tensor)
        and len(shape := x.shape) == 3
        and shape[0] == rows
        and shape[2] == width
        and x.is_floating_point()
        and x.device == device
    ):
        where = f" on {x.device}" if isinstance(x, Tensor) else ""
        raise MemspanError(
            f"x must be a floating-point tensor [{rows}, length, {width}] on {device}, the reader's, "
            f"not {_described(x)}{where}"
        )
    _check("starts", starts, torch.bool, x.shape[:2])


def _check(name: str, value: Tensor | None, dtype: torch.dtype, shape: torch.Size) -> None:
    if value is None:
        return
    if not (isinstance(value, Tensor) and value.dtype == dtype and value.shape == shape):
        kind = str(dtype).removeprefix("torch.")
        raise MemspanError(
            f"{name} must be a tensor of {kind} {list(shape)}, to go with the input, not "
            f"{_described(value)}"
        )


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def check_memory(memory: Memory, kind: type[Memory], rows: int | None = None) -> None:
    """Refuse a memory of another architecture, or with another number of rows (None: any)."""
    if not isinstance(memory, kind):
        raise MemspanError(
            f"the memory must be a {kind.__name__}, not {_described(memory)}: use this model's "
            "initial_memory, or an output's memory"
        )
    if rows is not None and memory.batch_size != rows:
        raise MemspanError(
            f"the memory has {memory.batch_size} rows and the tokens have {rows}: use "
            "memory.select for rows, or this model's initial_memory"
        )


def check_sizes(names: str, found: Sequence[int], wanted: Sequence[int]) -> None:
    """Refuse a memory of other sizes than the model and the input need; ``names``: of the sizes."""
    if tuple(found) != tuple(wanted):
        raise MemspanError(
            f"the memory is for ({names}) {tuple(found)}, and this model needs {tuple(wanted)}: use "
            "memory.select for rows, or this model's initial_memory"
        )


def check_batch_size(batch_size: object) -> None:
    """Refuse a batch size that is not an integer of at least 0."""
    if type(batch_size) is not int or batch_size < 0:
        raise MemspanError(f"batch_size must be a number of rows, 0 or more, not {batch_size!r}")


def outside(what: str, ids: Tensor, vocab_size: int) -> MemspanError:
    """The error that names the first of ``ids [B, T]`` outside the vocabulary; there is one."""
    wrong = (ids < 0) | (ids >= vocab_size)
    also = ""
    if what == "target":
        wrong &= ids != NOT_SCORED
        also = f", or {NOT_SCORED} for a target that is not scored"
    row, column = wrong.nonzero()[0].tolist()
    return MemspanError(
        f"{what} {int(ids[row, column])} in row {row}, column {column} is not in the vocabulary: "
        f"ids lie in 0 .. {vocab_size - 1}{also}"
    )
