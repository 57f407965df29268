"""``compiled.c`` from Python: the rules of fast weights as autograd functions, and a reader's
single tokens.

The C file says what is done, docs/fast_weights.md why.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from memspan.errors import MemspanError
from memspan.ops.delta_rule.feature_maps import DPFP
from memspan.ops.native import compiler

SOURCE = Path(__file__).with_suffix(".c")
SPAN = 64
"""Tokens between two memories that are saved for the backward pass."""
LONG_SPAN = 256
"""The same with ``recompute``."""
LEAST_WORK = 1 << 20
"""Numbers of memory that are read per thread, at least: starting one takes some 50 microseconds."""
_NO_MEMORY = "this machine's memory is full: use a smaller batch, or shorter segments"


class _View(ctypes.Structure):
    """A tensor ``[B, H, T, ...]`` that is contiguous but for these dimensions."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        ("row", ctypes.c_long),
        ("head", ctypes.c_long),
        ("token", ctypes.c_long),
    )


_LOOP_INTEGERS = (
    "n_heads", "steps", "width", "value_width", "n_features", "nu", "divides", "delta", "span",
)  # fmt: skip
_VIEWS = ("q", "k", "v", "beta", "y", "asked", "d_q", "d_k", "d_v", "d_beta", "d_y")
_MEMORIES = ("before", "d_after", "after", "d_before", "saved")


_FOR_BACKWARD = ("q", "k", "v", "beta", "asked", "before", "saved")


class _Loop(ctypes.Structure):
    """``Loop`` in C, field by field; likewise the two at the end."""

    _fields_ = (
        [(name, ctypes.c_long) for name in _LOOP_INTEGERS]
        + [("epsilon", ctypes.c_double)]
        + [(name, _View) for name in _VIEWS]
        + [(name, ctypes.c_void_p) for name in _MEMORIES]
    )  # fmt: skip


def available(like: Tensor) -> bool:
    """Whether the loops can run on tensors such as ``like``."""
    return compiler.available(SOURCE, like)


class CompiledRule(torch.autograd.Function):
    """``apply(q, k, v, beta, weights, dpfp, recompute) -> y, weights``, as ``ops.delta_rule`` has them.

    Without ``beta`` the rule is the sum rule. Without ``dpfp`` ``q`` and ``k`` are features.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor | None,
        weights: Tensor,
        dpfp: DPFP | None,
        recompute: bool,
    ) -> tuple[Tensor, Tensor]:
        q, k, v, weights = (
            _side_by_side(q),
            _side_by_side(k),
            _side_by_side(v),
            weights.contiguous(),
        )
        tensors = {"q": q, "k": k, "v": v, "before": weights, "after": torch.empty_like(weights)}
        tensors["y"] = _by_token(v)
        if beta is not None:
            tensors |= {"beta": beta, "asked": torch.empty_like(tensors["y"])}
        span = LONG_SPAN if recompute else SPAN
        if any(ctx.needs_input_grad):
            n_saved = (q.shape[2] - 1) // span
            tensors["saved"] = weights.new_empty(*weights.shape[:2], n_saved, *weights.shape[2:])
        _run("forward", tensors, dpfp, span)
        ctx.dpfp, ctx.span = dpfp, span
        ctx.save_for_backward(*(tensors.get(name) for name in _FOR_BACKWARD))
        return tensors["y"], tensors["after"]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor, d_after: Tensor) -> tuple[Tensor | None, ...]:
        tensors = dict(zip(_FOR_BACKWARD, ctx.saved_tensors, strict=True))
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        tensors |= {"d_y": _side_by_side(d_y), "d_after": d_after.contiguous()}
        tensors["d_before"] = torch.empty_like(tensors["before"])
        given = [name for name in ("q", "k", "v", "beta") if name in tensors]
        tensors |= {f"d_{name}": _by_token(tensors[name]) for name in given}
        _run("backward", tensors, ctx.dpfp, ctx.span)
        found = [tensors.get(name) for name in ("d_q", "d_k", "d_v", "d_beta", "d_before")]
        return (*found, None, None)


def _run(function: str, tensors: dict[str, Tensor], dpfp: DPFP | None, span: int) -> None:
    """Over all heads of all rows, in as many threads as PyTorch may use."""
    code = compiler.functions(SOURCE, tensors["v"].dtype)
    assert code is not None
    batch, n_heads, steps, width = tensors["k"].shape
    n_features, value_width = tensors["before"].shape[2:]
    loop = _Loop(
        n_heads=n_heads,
        steps=steps,
        width=width,
        value_width=value_width,
        n_features=n_features,
        nu=dpfp.nu if dpfp else 0,
        divides=dpfp is not None and dpfp.epsilon is not None,
        epsilon=dpfp.epsilon or 0.0 if dpfp else 0.0,
        delta="beta" in tensors,
        span=span,
    )
    for name, tensor in tensors.items():
        if name in _MEMORIES:
            setattr(loop, name, tensor.data_ptr())
        else:
            setattr(loop, name, _View(tensor.data_ptr(), *tensor.stride()[:3]))
    run, total = getattr(code, function), batch * n_heads
    work = total * steps * n_features * value_width
    n_threads = max(1, min(torch.get_num_threads(), total, work // LEAST_WORK))
    edges = [ctypes.c_long(total * n // n_threads) for n in range(n_threads + 1)]
    done = [0] * n_threads

    def share(n: int) -> None:
        done[n] = run(ctypes.byref(loop), *edges[n : n + 2])

    threads = [threading.Thread(target=share, args=(n,)) for n in range(1, n_threads)]
    for thread in threads:
        thread.start()
    share(0)
    for thread in threads:
        thread.join()
    if not all(done):
        raise MemspanError(_NO_MEMORY)


def _side_by_side(x: Tensor) -> Tensor:
    """``x``, copied only where an item's numbers do not lie side by side."""
    return x if x.stride(-1) == 1 or x.dim() == 3 else x.contiguous()


def _by_token(like: Tensor) -> Tensor:
    """An empty ``[B, H, T, ...]`` that lies as ``[B, T, H, ...]``, the order of projections."""
    batch, n_heads, length = like.shape[:3]
    return like.new_empty(batch, length, n_heads, *like.shape[3:]).transpose(1, 2)


# ----- Single tokens

_LAYER = (
    "norm_weight", "norm_bias", "projections", "output", "output_bias", "inner_norm_weight",
    "inner_norm_bias", "inner", "inner_bias", "outer", "outer_bias", "memory",
)  # fmt: skip
_STACK_INTEGERS = (
    "batch", "d_model", "n_heads", "width", "d_ff", "n_layers", "nu", "divides", "delta", "gelu",
)  # fmt: skip


class _Layer(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in _LAYER)


class _Stack(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_long) for name in _STACK_INTEGERS]
        + [("epsilon", ctypes.c_double), ("norm_epsilon", ctypes.c_double)]
        + [("final_weight", ctypes.c_void_p), ("final_bias", ctypes.c_void_p)]
        + [("layers", ctypes.c_void_p), ("x", ctypes.c_void_p)]
    )  # fmt: skip


class CompiledStep:
    """A token of every row through a stack, which writes to its memories in place.

    Args:
        layers: per layer the tensors of ``Layer`` in C; a norm's may be left out.
        final_norm: gain and bias, or none.
        dpfp: the feature map.
        integers: the sizes in ``Stack``; ``delta`` and ``gelu`` are flags.
        norm_epsilon: of every norm.
    """

    def __init__(
        self,
        layers: Sequence[dict[str, Tensor]],
        final_norm: Sequence[Tensor],
        dpfp: DPFP,
        integers: dict[str, int],
        norm_epsilon: float,
    ) -> None:
        code = compiler.functions(SOURCE, layers[0]["memory"].dtype)
        assert code is not None
        self._step = code.step
        # They must live as long as this.
        self._tensors = [*(t for layer in layers for t in layer.values()), *final_norm]
        assert all(t.is_contiguous() for t in self._tensors)
        pointers = [{name: t.data_ptr() for name, t in layer.items()} for layer in layers]
        self._layers = (_Layer * len(layers))(*(_Layer(**each) for each in pointers))
        gain, bias = [t.data_ptr() for t in final_norm] or (None, None)
        self._stack = _Stack(
            **integers,
            n_layers=len(layers),
            nu=dpfp.nu,
            divides=dpfp.epsilon is not None,
            epsilon=dpfp.epsilon or 0.0,
            norm_epsilon=norm_epsilon,
            final_weight=gain,
            final_bias=bias,
            layers=ctypes.addressof(self._layers),
        )
        self._at = ctypes.byref(self._stack)
        self._matrices = ctypes.c_void_p(code.prepare(self._at))
        if not self._matrices:
            raise MemspanError(_NO_MEMORY)
        weakref.finalize(self, code.release, self._matrices, ctypes.c_long(len(layers)))

    def read(self, x: Tensor) -> bool:
        """Read ``x [B, 1, D]``, contiguous, and put there what comes out; whether that is finite."""
        self._stack.x = x.data_ptr()
        finite = self._step(self._at, self._matrices)
        if finite < 0:
            raise MemspanError(_NO_MEMORY)
        return bool(finite)
