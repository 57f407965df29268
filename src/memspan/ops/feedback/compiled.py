"""The Feedback Transformer's recurrence by the loops in ``compiled.c``."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memspan.native import library
from memspan.native.threads import in_shares
from memspan.ops.feedback.buffers import Buffers, Options

SOURCE = Path(__file__).with_suffix(".c")
INTEGERS = (
    "steps", "batch", "d_model", "n_heads", "width", "d_ff", "n_layers", "groups", "n_old", "span",
    "kv_stride", "norms_memory", "kept_slots",
)  # fmt: skip
MATRICES = ("query", "output", "inner", "outer", "memory")
POINTERS = (
    *MATRICES, "query_bias", "position_keys", "position_scores", "inner_bias", "memory_bias", "mix",
    "gains", "biases", "visible", "kept_weights", "kept_attention",
    "kept_activated", "kept_feed_forward", "streams", "queries", "attended", "activated", "vectors",
    "kv", "moments", "probabilities", "sums", "before", "d_streams", "d_added", "d_inner",
    "d_query", "d_vectors", "d_projected", "d_kv", "d_position_keys", "d_position_scores",
    "d_scores",
)  # fmt: skip


class _Loop(ctypes.Structure):
    """``Loop`` in C, field by field."""

    _fields_ = (
        [(name, ctypes.c_int64) for name in INTEGERS]
        + [(name, ctypes.c_double) for name in ("eps", "weights_scale", "scale")]
        + [(name, ctypes.c_void_p) for name in POINTERS]
    )  # fmt: skip


def available(like: Tensor) -> bool:
    """True if the loop can run on tensors such as ``like``."""
    return library.available(SOURCE, like)


def obstacle(like: Tensor) -> str | None:
    """Why the loops cannot run on tensors such as ``like``; None if they can."""
    return None if available(like) else library.obstacle("fused")


class _CompiledLoop:
    """The loop for certain weights and sizes; ``kv`` and ``visible`` come with each call.

    All tensors but keys and values are contiguous, and live as long as this.
    """

    def __init__(self, buffers: Buffers, options: Options, backward: bool = False) -> None:
        code: Any = library.functions(SOURCE, buffers["streams"].dtype, False)
        b = {name: t if name.endswith("kv") else t.contiguous() for name, t in buffers.items()}
        b["query"] = buffers["query"].transpose(1, 2).contiguous()
        n_layers, d_model, n_heads, width = b["query"].shape
        kept = b.get("kept_weights")
        self._loop = _Loop(
            steps=b["streams"].shape[1],
            batch=b["streams"].shape[2],
            d_model=d_model,
            n_heads=n_heads,
            width=width,
            d_ff=b["inner"].shape[2],
            n_layers=n_layers,
            groups=b["memory"].shape[1] // (2 * n_heads * width),
            span=options.span,
            norms_memory=options.norms_memory,
            kept_slots=0 if kept is None else kept.shape[3],
            eps=options.eps,
            weights_scale=options.weights_scale,
            scale=options.scale,
            **{name: t.data_ptr() for name, t in b.items()},
        )
        self._library = code
        self._tensors = b
        self._at = ctypes.byref(self._loop)
        self._weights = ctypes.c_void_p(code.prepare(self._at, ctypes.c_int(backward)))
        library.refuse_without_memory(self._weights)
        weakref.finalize(self, code.release, self._weights)
        self._products = sum(b[name].numel() for name in MATRICES)

    def forward(self, given: Buffers) -> None:
        """Read, with ``kv`` and any ``visible`` among ``given``."""
        self._see(given)
        self._in_shares(self._library.forward, self._weights)

    def backward(self, given: Buffers) -> None:
        """Run backward; call ``forward`` with the same tensors first."""
        self._see(given)
        self._in_shares(self._library.backward, self._weights)
        loop = self._loop
        self._in_shares(self._library.position_gradients, total=loop.n_layers * loop.n_heads)

    def _see(self, given: Buffers) -> None:
        loop = self._loop
        kv = given["kv"]
        loop.kv = kv.data_ptr()
        loop.kv_stride = kv.stride(-1)
        loop.n_old = kv.shape[3] - loop.steps
        loop.visible = given["visible"].data_ptr() if "visible" in given else None

    def _in_shares(self, function: Any, *given: Any, total: int | None = None) -> None:
        """Call a function for its share of the rows, or of ``total`` others."""
        rows = self._loop.batch
        work = rows * self._loop.steps * self._products
        in_shares(function, (self._at, *given), rows if total is None else total, work)


def new_slots(like: Tensor, *sizes: int) -> Tensor:
    """``[2, G, H * B, N, K]``, in memory width first."""
    *outer, n_slots, width = sizes
    return like.new_empty(2, *outer, width, n_slots).transpose(3, 4)


def prepare(buffers: Buffers, options: Options) -> Callable[[Buffers], None]:
    """As :func:`memspan.ops.feedback.steps.prepare`."""
    return _CompiledLoop(buffers, options).forward


def backward(buffers: Buffers, options: Options, gradients: Buffers) -> None:
    """As :func:`memspan.ops.feedback.steps.backward`."""
    room = {"d_scores": torch.empty_like(buffers["probabilities"])}
    _CompiledLoop(buffers | gradients | room, options, backward=True).backward(buffers)
