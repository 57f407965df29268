"""Single tokens of Fast Weights through a whole stack, by the step in C."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from memspan.native import library
from memspan.native.stack import PackedStack, Stack
from memspan.ops.fast_weights.feature_maps import DPFP


class _Step(ctypes.Structure):
    _fields_ = (
        ("stack", Stack),
        ("nu", ctypes.c_int64),
        ("normalises", ctypes.c_int64),
        ("delta", ctypes.c_int64),
        ("epsilon", ctypes.c_double),
        ("memories", ctypes.c_void_p),
    )


class CompiledStep:
    """One token of every row through a stack whose memories are written in place, without gradients.

    Args:
        stack: the weights; projections are queries, keys, values and, for the delta rule, beta.
        memories: per layer ``[B, H, F, K]``, contiguous.
        dpfp: the feature map.
        delta: whether it is the delta rule.
    """

    def __init__(
        self, stack: PackedStack, memories: Sequence[Tensor], dpfp: DPFP, delta: bool
    ) -> None:
        # C has their addresses: they must live as long as this.
        self._stack = stack
        self._memories = list(memories)
        assert all(t.is_contiguous() for t in self._memories)
        self._pointers = (ctypes.c_void_p * len(memories))(*(t.data_ptr() for t in memories))
        self._step = _Step(
            stack=stack.structure,
            nu=dpfp.nu,
            normalises=dpfp.epsilon is not None,
            delta=delta,
            epsilon=dpfp.epsilon or 0.0,
            memories=ctypes.addressof(self._pointers),
        )
        self._at = ctypes.byref(self._step)

    def read(self, x: Tensor) -> bool:
        """Read ``x [B, 1, D]``, contiguous, and replace it by the output; whether that is finite.

        Raises:
            MemspanError: there is not enough memory.
        """
        self._step.stack.x = x.data_ptr()
        finite = self._stack.code.step(self._at, self._stack.matrices)
        library.refuse_without_memory(finite >= 0)
        return bool(finite)
