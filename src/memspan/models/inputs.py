"""What callers give a language model, checked once, where they give it.

Only what costs nothing is looked at here: types, shapes, and on a CPU the lengths of padded rows. A
token outside the vocabulary is found by looking it up; then :func:`outside` says which it is. On a
GPU that look-up ends the program with torch's own message: to look before would wait for the GPU in
every pass.
"""

from __future__ import annotations

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
    """Refuse what is not as :meth:`memspan.models.LanguageModel.forward` describes it."""
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


def _check(name: str, value: Tensor | None, dtype: torch.dtype, shape: torch.Size) -> None:
    if value is None:
        return
    if not (isinstance(value, Tensor) and value.dtype == dtype and value.shape == shape):
        kind = str(dtype).removeprefix("torch.")
        raise MemspanError(
            f"{name} must be a tensor of {kind} {list(shape)}, to go with the tokens, not "
            f"{_described(value)}"
        )


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def check_memory(memory: Memory, kind: type[Memory], rows: int | None = None) -> None:
    """Refuse a memory of another architecture, or of other rows than ``rows`` (None: any)."""
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


def check_batch_size(batch_size: object) -> None:
    """Refuse what is no number of rows."""
    if type(batch_size) is not int or batch_size < 0:
        raise MemspanError(f"batch_size must be a number of rows, 0 or more, not {batch_size!r}")


def outside(what: str, ids: Tensor, vocab_size: int) -> MemspanError:
    """The error for ``ids`` of which at least one is not in the vocabulary."""
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
