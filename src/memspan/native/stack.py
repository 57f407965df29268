"""The weights of a stack of pre-norm layers, for steps in C that take one token through all of it."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from memspan.native import library

_LAYER = (
    "norm_weight", "norm_bias", "projections", "projections_bias", "output", "output_bias",
    "inner_norm_weight", "inner_norm_bias", "inner", "inner_bias", "outer", "outer_bias",
    *(
        f"{gate}_gate_{name}"
        for gate in ("attention", "feed_forward")
        for name in ("of_branch", "of_stream", "of_reset_stream", "bias")
    ),
)  # fmt: skip
_INTEGERS = (
    "batch", "n_layers", "d_model", "n_heads", "width", "d_projected", "d_ff", "gelu",
)  # fmt: skip


ROWS_AT_ONCE = 6
"""Rows that use a weight when it is read."""


class _Layer(ctypes.Structure):
    """``Layer`` in ``stack.h``, field by field."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in _LAYER)


class Stack(ctypes.Structure):
    """The start of a step's own structure in C."""

    _fields_ = (
        [(name, ctypes.c_int64) for name in _INTEGERS]
        + [("norm_epsilon", ctypes.c_double)]
        + [(name, ctypes.c_void_p) for name in ("final_weight", "final_bias", "layers", "x")]
    )


class PackedStack:
    """A copy of the weights, cut into panels for products of few rows.

    Args:
        source: the C file whose ``step`` reads a token.
        layers: per layer the tensors of ``Layer`` in C, ``[outputs, inputs]``; norms, biases,
            gates and the feed-forward sub-layer may be missing.
        final_norm: gain and bias, or nothing.
        n_heads: heads.
        batch: rows of a token.
        gelu: the activation; False: relu.
        norm_epsilon: of every norm.
        bf16_weights: keep the matrices in bfloat16; the rest, and all sums, stay float32.

    Raises:
        MemspanError: there is not enough memory for the copy.
    """

    def __init__(
        self,
        source: Path,
        layers: Sequence[dict[str, Tensor]],
        final_norm: Sequence[Tensor],
        *,
        n_heads: int,
        batch: int,
        gelu: bool,
        norm_epsilon: float,
        bf16_weights: bool = False,
    ) -> None:
        first = layers[0]
        code = library.functions(source, first["output"].dtype, bf16_weights)
        assert code is not None
        self.code = code
        self.n_weights = sum(t.numel() for layer in layers for t in layer.values())
        d_model, attended = first["output"].shape
        # C has the addresses of biases and norms: they must live as long as this.
        layers = [{name: t.contiguous() for name, t in layer.items()} for layer in layers]
        final_norm = [t.contiguous() for t in final_norm]
        self._tensors = layers, final_norm
        pointers = [{name: t.data_ptr() for name, t in layer.items()} for layer in layers]
        self._layers = (_Layer * len(layers))(*(_Layer(**each) for each in pointers))
        gain, bias = [t.data_ptr() for t in final_norm] or (None, None)
        self.structure = Stack(
            batch=batch,
            n_layers=len(layers),
            d_model=d_model,
            n_heads=n_heads,
            width=attended // n_heads,
            d_projected=len(first["projections"]),
            d_ff=len(first["inner"]) if "inner" in first else 0,
            gelu=gelu,
            norm_epsilon=norm_epsilon,
            final_weight=gain,
            final_bias=bias,
            layers=ctypes.addressof(self._layers),
        )
        self.matrices = ctypes.c_void_p(code.prepare(ctypes.byref(self.structure)))
        library.refuse_without_memory(self.matrices)
        weakref.finalize(self, code.release, self.matrices, ctypes.c_int64(len(layers)))
