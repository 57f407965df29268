"""``feedback_loop.c``, called by ctypes. Where it cannot be had, the loop in PyTorch serves."""

from __future__ import annotations

import ctypes
import weakref

from torch import Tensor

from memspan.ops import compiler

NAME = "feedback_loop"
INTEGERS = (
    "steps", "batch", "d_model", "n_heads", "width", "d_ff", "n_layers", "groups", "n_old", "span",
    "gelu", "kv_stride", "norms_memory",
)  # fmt: skip
POINTERS = (
    "query", "query_bias", "position_keys", "position_scores", "output", "inner", "inner_bias",
    "outer", "memory", "memory_bias", "mix", "hidden", "seen", "states", "middles", "queries",
    "attended", "activated", "before", "vectors", "kv", "moments", "memory_moments",
    "probabilities", "d_out",
    "d_vectors", "d_states", "d_middles", "d_inner", "d_query", "d_first", "d_mixed", "d_projected",
    "d_kv", "d_position_keys", "d_position_scores",
)  # fmt: skip


class _Loop(ctypes.Structure):
    """``Loop`` in C, field by field."""

    _fields_ = (
        [(name, ctypes.c_long) for name in INTEGERS]
        + [("eps", ctypes.c_double)]
        + [(name, ctypes.c_void_p) for name in POINTERS]
    )  # fmt: skip


def available(like: Tensor) -> bool:
    """Whether the loop can run on tensors such as ``like``."""
    return compiler.available(NAME, like)


class CompiledLoop:
    """The loop for certain weights and sizes; what is given later replaces what was given before.

    All tensors are contiguous and of one type, and live as long as this.
    """

    def __init__(self, eps: float, integers: dict[str, int], tensors: dict[str, Tensor]) -> None:
        code = compiler.library(NAME, next(iter(tensors.values())).dtype)
        assert code is not None
        self._library, self._loop = code, _Loop(eps=eps)
        self._tensors: dict[str, Tensor] = {}
        self.give(integers, tensors)
        self._weights = ctypes.c_void_p(code.prepare(ctypes.byref(self._loop)))
        weakref.finalize(self, code.release, self._weights)

    def give(self, integers: dict[str, int], tensors: dict[str, Tensor]) -> None:
        for name, integer in integers.items():
            setattr(self._loop, name, integer)
        for name, tensor in tensors.items():
            assert tensor.is_contiguous(), name
            setattr(self._loop, name, tensor.data_ptr())
        self._tensors |= tensors

    def forward(self, kv_offset: int = 0) -> None:
        """Read ``steps`` tokens. Keys and values start ``kv_offset`` slots into their buffer."""
        kv = self._tensors["kv"]
        self._loop.kv = kv.data_ptr() + kv_offset * kv.element_size()
        self._library.forward(ctypes.byref(self._loop), self._weights)

    def backward(self) -> None:
        """And back, after a forward with the same tensors."""
        self._library.backward(ctypes.byref(self._loop))
