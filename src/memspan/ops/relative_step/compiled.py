"""One token through a whole stack with relative positions by the step in ``compiled.c``."""

from __future__ import annotations

import ctypes
from pathlib import Path

from torch import Tensor

from memspan.native import library
from memspan.native.stack import ROWS_AT_ONCE, PackedStack, Stack
from memspan.native.threads import in_shares

SOURCE = Path(__file__).with_suffix(".c")
_INTEGERS = ("columns", "end", "covered", "most")
_POINTERS = (
    "used", "hidden", "keys", "values", "position_keys", "position_scores", "received",
)  # fmt: skip


class _Step(ctypes.Structure):
    """``Step`` in C, field by field."""

    _fields_ = (
        [("stack", Stack)]
        + [(name, ctypes.c_int64) for name in _INTEGERS]
        + [("scale", ctypes.c_double)]
        + [(name, ctypes.c_void_p) for name in _POINTERS]
    )


class _Compressed(ctypes.Structure):
    """``Compressed`` in C, field by field."""

    _fields_ = [("n", ctypes.c_int64)] + [
        (name, ctypes.c_void_p) for name in ("rows", "columns", "older", "kept", "hidden")
    ]


def available(like: Tensor, bf16_weights: bool = False) -> bool:
    """True if the step can run on tensors such as ``like``; ``bf16_weights``: with matrices in bf16."""
    return library.available(SOURCE, like, bf16_weights)


class CompiledStep:
    """One token of every row, without gradients. It keeps the weights and nothing of the stream.

    ``stack``: the weights; projections are queries, with ``u`` as their bias, keys and values.
    """

    def __init__(self, stack: PackedStack) -> None:
        self._stack = stack
        self._step = _Step(stack=stack.structure, scale=stack.structure.width**-0.5)
        self._at = ctypes.byref(self._step)

    def read(
        self,
        x: Tensor,
        buffers: tuple[Tensor, Tensor, Tensor],
        end: int,
        used: Tensor,
        most: int,
        positions: tuple[Tensor, Tensor],
        received: Tensor | None = None,
    ) -> None:
        """Read ``x [B, 1, D]``, contiguous, and replace it by the output; many rows in as many threads
        as PyTorch may use.

        All tensors but ``used`` are contiguous and of the weights' type.

        Args:
            x: the token.
            buffers: hidden ``[L, B, C, D]``, keys and values ``[L, B, H, C, K]``; column ``end`` of
                them is written, older slots stand before it.
            end: the token's column.
            used: int64 ``[B]``: how many columns before ``end`` a row attends to.
            most: the largest of these numbers.
            positions: ``R`` and ``(v - u) . R_d + S_d``, farthest first and for at least
                ``most + 1`` distances: ``[L, H, N, K]`` and ``[L, H, N]``.
            received: ``[L, B, most + 1]``: the attention that each column up to ``end`` gets is added.

        Raises:
            MemspanError: there is not enough memory.
        """
        step = self._step
        used = used.contiguous()
        step.stack.x = x.data_ptr()
        step.used = used.data_ptr()
        self._point_at(buffers)
        step.end = end
        step.most = most
        step.position_keys, step.position_scores = (t.data_ptr() for t in positions)
        step.covered = positions[0].shape[2]
        step.received = None if received is None else received.data_ptr()
        # Fewer rows than the products take at once would only read the weights twice.
        rows = len(x)
        code = self._stack.code
        given = self._at, self._stack.matrices
        in_shares(code.step, given, rows, rows * self._stack.n_weights, least=ROWS_AT_ONCE)

    def insert(
        self,
        hidden: Tensor,
        buffers: tuple[Tensor, Tensor, Tensor],
        rows: Tensor,
        columns: Tensor,
        older: Tensor,
        kept: Tensor,
    ) -> None:
        """Put a new compressed slot into each of some rows, with its keys and values, behind the older
        ones, which move to stand in front of it.

        Args:
            hidden: the slots, of the weights' type, ``[L, n, D]``.
            buffers: as in :meth:`read`.
            rows: int64 ``[n]`` on the CPU, like the other three.
            columns: where the new slots are put.
            older: the column of the oldest slot that is kept.
            kept: how many are.

        Raises:
            MemspanError: there is not enough memory.
        """
        self._point_at(buffers)
        tensors = [t.contiguous() for t in (rows, columns, older, kept, hidden)]
        given = _Compressed(len(rows), *(t.data_ptr() for t in tensors))
        code = self._stack.code
        matrices = self._stack.matrices
        library.refuse_without_memory(code.insert(self._at, matrices, ctypes.byref(given)))

    def _point_at(self, buffers: tuple[Tensor, Tensor, Tensor]) -> None:
        step = self._step
        step.hidden, step.keys, step.values = (buffer.data_ptr() for buffer in buffers)
        step.columns = buffers[0].shape[2]
