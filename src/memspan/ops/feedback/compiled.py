"""The Feedback Transformer's recurrence by the loops in ``compiled.c``."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memspan.ops.feedback.buffers import Call, FoldedWeights, Forward, Gradients, Saved
from memspan.ops.native import compiler
from memspan.ops.native.threads import in_shares

SOURCE = Path(__file__).with_suffix(".c")
INTEGERS = (
    "steps", "batch", "d_model", "n_heads", "width", "d_ff", "n_layers", "groups", "n_old", "span",
    "gelu", "kv_stride", "norms_memory", "post_norm", "kept_slots",
)  # fmt: skip
POINTERS = (
    "query", "query_bias", "position_keys", "position_scores", "output", "inner", "inner_bias",
    "outer", "memory", "memory_bias", "mix", "gains", "biases", "additive_mask", "has_memory",
    "kept_weights", "kept_attention", "kept_activated", "kept_feed_forward", "states", "middles",
    "sums", "queries", "attended", "activated", "before", "vectors", "kv", "moments",
    "memory_moments", "probabilities", "d_out", "d_vectors", "d_states", "d_middles", "d_attention",
    "d_feed_forward", "d_inner", "d_query", "d_first", "d_mixed", "d_projected", "d_kv",
    "d_position_keys", "d_position_scores", "d_scores",
)  # fmt: skip


class _Loop(ctypes.Structure):
    """``Loop`` in C, field by field."""

    _fields_ = (
        [(name, ctypes.c_long) for name in INTEGERS]
        + [(name, ctypes.c_double) for name in ("eps", "weights_scale", "scale")]
        + [(name, ctypes.c_void_p) for name in POINTERS]
    )  # fmt: skip


def available(like: Tensor) -> bool:
    """Whether the loop can run on tensors such as ``like``."""
    return compiler.available(SOURCE, like)


def obstacle(like: Tensor) -> str | None:
    """Why the loops cannot run on tensors such as ``like``; None if they can."""
    return None if available(like) else compiler.obstacle("fused")


class _CompiledLoop:
    """The loop for certain weights and sizes; what is given later replaces what was given before.

    All tensors but keys and values are contiguous, and live as long as this.
    """

    def __init__(
        self, saved: Saved, w: FoldedWeights, call: Call, g: dict[str, Tensor] | None = None
    ) -> None:
        code = compiler.functions(SOURCE, saved.states.dtype, False)
        assert code is not None
        weights_scale, scale = (1.0, 1.0) if call.kept is None else call.kept[-2:]
        self._library = code
        self._loop = _Loop(eps=call.eps, weights_scale=weights_scale, scale=scale)
        self._tensors: dict[str, Tensor | None] = {}
        integers, tensors = _arguments(saved, w, call)
        self._give(integers, tensors | (g or {}))
        self._at = ctypes.byref(self._loop)
        self._weights = ctypes.c_void_p(code.prepare(self._at, ctypes.c_int(g is not None)))
        compiler.refuse_without_memory(self._weights)
        weakref.finalize(self, code.release, self._weights)
        names = ("query", "output", "inner", "outer", "memory")
        self._products = sum(tensors[name].numel() for name in names)

    def _give(self, integers: dict[str, int], tensors: Mapping[str, Tensor | None]) -> None:
        """Set these fields of the C structure; tensors by their addresses, and they are kept alive."""
        for name, integer in integers.items():
            setattr(self._loop, name, integer)
        for name, tensor in tensors.items():
            assert tensor is None or name.endswith("kv") or tensor.is_contiguous(), name
            setattr(self._loop, name, None if tensor is None else tensor.data_ptr())
        self._tensors |= tensors

    def forward(self, call: Call, kv: Tensor, start: int = 0) -> None:
        """Read ``steps`` tokens; the slots that the first of them sees begin at ``start`` in ``kv``."""
        masks = {"additive_mask": call.additive_mask, "has_memory": call.has_memory}
        self._give({"n_old": call.n_old, "kv_stride": kv.stride(-1)}, {"kv": kv, **masks})
        self._loop.kv = kv.data_ptr() + start * kv.element_size()
        self._in_shares(self._library.forward, self._weights)

    def backward(self) -> None:
        """And back, after a forward with the same tensors, of weights prepared for that."""
        self._in_shares(self._library.backward, self._weights)
        loop = self._loop
        self._in_shares(self._library.position_gradients, total=loop.n_layers * loop.n_heads)

    def _in_shares(self, function: Any, *given: Any, total: int | None = None) -> None:
        """Call a function for its share of the rows, or of ``total`` others."""
        rows = self._loop.batch
        work = rows * self._loop.steps * self._products
        in_shares(function, (self._at, *given), rows if total is None else total, work)


def new_slots(like: Tensor, *sizes: int) -> Tensor:
    """``[2, G, H * B, N, K]``, in memory width first."""
    *outer, n_slots, width = sizes
    return like.new_empty(2, *outer, width, n_slots).transpose(3, 4)


def prepare(saved: Saved, w: FoldedWeights, call: Call) -> Forward:
    """As :func:`memspan.ops.feedback.steps.prepare`."""
    n_layers, n_steps, batch, _ = saved.middles.shape
    seen_slots = sum(min(call.span, call.n_old + t) for t in range(n_steps))
    saved.probabilities = saved.states.new_empty(saved.queries[0].shape[:2].numel() * seen_slots)
    saved.moments = saved.states.new_empty(n_layers, n_steps, 4, batch)
    return _CompiledLoop(saved, w, call).forward


def backward(
    saved: Saved, w: FoldedWeights, call: Call, d_out: Tensor, d_vectors: Tensor
) -> Gradients:
    """As :func:`memspan.ops.feedback.steps.backward`."""
    g = Gradients.empty(saved, w, call)
    tensors = {f"d_{name}": tensor for name, tensor in vars(g).items()}
    tensors |= {"d_out": d_out.contiguous(), "d_vectors": d_vectors.contiguous()}
    tensors["d_scores"] = torch.empty_like(saved.probabilities)
    _CompiledLoop(saved, w, call, tensors).backward()
    return g


def _arguments(
    saved: Saved, w: FoldedWeights, call: Call
) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Sizes and tensors under the names that they have in C."""
    n_layers, n_steps, batch, d_model = saved.middles.shape
    n_heads, _, width = w.query.shape[1:]
    integers = {
        "steps": n_steps,
        "batch": batch,
        "d_model": d_model,
        "n_heads": n_heads,
        "width": width,
        "d_ff": w.inner.shape[2],
        "n_layers": n_layers,
        "groups": w.n_groups,
        "n_old": call.n_old,
        "span": call.span,
        "gelu": int(call.activation == "gelu"),
        "kv_stride": saved.kv.stride(-1),
        "norms_memory": int(w.norms_memory),
        "post_norm": int(w.post_norm),
    }
    tensors = {name: tensor.contiguous() for name, tensor in w.tensors().items()}
    tensors["query"] = w.query.transpose(1, 2).contiguous()
    names = ("states", "middles", "sums", "queries", "attended", "activated", "vectors", "kv")
    tensors |= {
        name: getattr(saved, name)
        for name in (*names, "moments", "memory_moments", "probabilities")
    }
    if call.activation == "gelu":
        tensors["before"] = saved.before
    if call.additive_mask is not None and call.has_memory is not None:
        tensors |= {"additive_mask": call.additive_mask, "has_memory": call.has_memory}
    if call.kept is not None:
        masks = call.kept._asdict().items()
        tensors |= {f"kept_{name}": kept for name, kept in masks if isinstance(kept, Tensor)}
    if call.kept is not None and call.kept.weights is not None:
        integers["kept_slots"] = call.kept.weights.shape[3]
    return integers, tensors
