"""The Feedback Transformer's recurrence by the loops in ``compiled.c``: forward, backward, and reading
on without gradients."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memspan.ops.feedback.buffers import Call, FoldedWeights, Gradients, Saved, mask_of_old_slots
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


class CompiledLoop:
    """The loop for certain weights and sizes; what is given later replaces what was given before.

    All tensors are contiguous, and live as long as this.
    """

    def __init__(
        self,
        call: Call,
        integers: dict[str, int],
        tensors: dict[str, Tensor],
        *,
        backward: bool = False,
    ) -> None:
        code = compiler.functions(SOURCE, tensors["states"].dtype, False)
        assert code is not None
        weights_scale, scale = (1.0, 1.0) if call.kept is None else call.kept[-2:]
        self._library = code
        self._loop = _Loop(eps=call.eps, weights_scale=weights_scale, scale=scale)
        self._tensors: dict[str, Tensor | None] = {}
        self.give(integers, tensors)
        self._at = ctypes.byref(self._loop)
        self._weights = ctypes.c_void_p(code.prepare(self._at, ctypes.c_int(backward)))
        compiler.refuse_without_memory(self._weights)
        weakref.finalize(self, code.release, self._weights)
        names = ("query", "output", "inner", "outer", "memory")
        self._products = sum(tensors[name].numel() for name in names)

    def give(self, integers: dict[str, int], tensors: Mapping[str, Tensor | None]) -> None:
        """Set these fields of the C structure; tensors by their addresses, and they are kept alive."""
        for name, integer in integers.items():
            setattr(self._loop, name, integer)
        for name, tensor in tensors.items():
            assert tensor is None or tensor.is_contiguous(), name
            setattr(self._loop, name, None if tensor is None else tensor.data_ptr())
        self._tensors |= tensors

    def forward(self, kv_offset: int = 0) -> None:
        """Read ``steps`` tokens. Keys and values start ``kv_offset`` slots into their buffer."""
        kv = self._tensors["kv"]
        assert kv is not None
        self._loop.kv = kv.data_ptr() + kv_offset * kv.element_size()
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


def forward(saved: Saved, w: FoldedWeights, call: Call) -> None:
    """As :func:`memspan.ops.feedback.steps.forward`."""
    n_layers, n_steps, batch, _ = saved.middles.shape
    seen_slots = sum(min(call.span, call.n_old + t) for t in range(n_steps))
    saved.probabilities = saved.states.new_empty(saved.queries[0].shape[:2].numel() * seen_slots)
    saved.moments = saved.states.new_empty(n_layers, n_steps, 4, batch)
    integers, tensors = _arguments(saved, w, call)
    CompiledLoop(call, integers, tensors).forward()


def backward(
    saved: Saved, w: FoldedWeights, call: Call, d_out: Tensor, d_vectors: Tensor
) -> Gradients:
    """As :func:`memspan.ops.feedback.steps.backward`."""
    n_layers, n_steps, batch, _ = saved.middles.shape
    n_heads, _, width = w.query.shape[1:]
    empty = torch.empty_like
    d_kv = torch.zeros_like(saved.kv)
    d_states, d_middles = empty(saved.middles), empty(saved.middles)
    plain = not w.post_norm and call.kept is None
    g = Gradients(
        states=d_states,
        middles=d_middles,
        attention=d_middles if plain else empty(d_middles),
        feed_forward=d_states if plain else empty(d_states),
        inner=saved.middles.new_empty(n_layers, n_steps, batch, w.inner.shape[2]),
        query=saved.middles.new_empty(n_layers, n_steps, batch, n_heads * width),
        first=empty(saved.vectors),
        mixed=empty(saved.vectors),
        projected=saved.vectors.new_empty(n_steps, batch, w.memory.shape[1]),
        kv=d_kv.transpose(3, 4),
        position_keys=torch.zeros_like(w.position_keys, memory_format=torch.contiguous_format),
        position_scores=torch.zeros_like(w.position_scores, memory_format=torch.contiguous_format),
    )
    integers, tensors = _arguments(saved, w, call)
    tensors |= {f"d_{f.name}": getattr(g, f.name) for f in fields(g)}
    tensors |= {"d_kv": d_kv, "d_out": d_out.contiguous(), "d_vectors": d_vectors.contiguous()}
    tensors["d_scores"] = empty(saved.probabilities)
    CompiledLoop(call, integers, tensors, backward=True).backward()
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
        "kv_stride": call.n_old + n_steps,
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


class CompiledReader:
    """Reading on without gradients by the loop in C, for frozen weights and one number of rows."""

    def __init__(
        self, weights: FoldedWeights, batch: int, span: int, activation: str, eps: float
    ) -> None:
        self.weights, self.batch = weights, batch
        self.call = Call(0, span, activation, eps)
        self.saved: Saved | None = None
        self.loop: CompiledLoop | None = None
        # Whether the last call had rows of different length.
        self.masked = False

    def read(
        self, x: Tensor, kv: Tensor, end: int, n_old: int, length: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Read ``x [B, T, D]``; its keys and values are written at ``end``.

        Args:
            kv: ``[2, G, H * B, K, N]``, with room for ``T`` slots from ``end`` on.
            n_old: slots before ``end`` that the first token may see.
            length: int64 ``[B]``: how many of them a row has (None: all).

        Returns:
            The last layer's output ``[B, T, D]`` and the memory vectors ``[T, B, D]``, until the next
            call.
        """
        n_steps = x.shape[1]
        if self.saved is None or self.saved.states.shape[1] != n_steps:
            self._prepare(n_steps, kv)
        saved, loop = self.saved, self.loop
        assert saved is not None
        assert loop is not None
        integers = {"n_old": n_old, "kv_stride": kv.shape[-1]}
        additive_mask = has_memory = None
        if length is not None:
            additive_mask, has_memory = mask_of_old_slots(length, n_old, x.dtype)
        if length is not None or self.masked:
            saved.attended[:, 0, :, -1] = 1 if has_memory is None else has_memory
        self.masked = length is not None
        loop.give(integers, {"kv": kv, "additive_mask": additive_mask, "has_memory": has_memory})
        saved.states[0] = x.transpose(0, 1)
        loop.forward(end - n_old)
        return saved.states[-1].transpose(0, 1), saved.vectors

    def _prepare(self, n_steps: int, kv: Tensor) -> None:
        w = self.weights
        n_layers, n_heads, d_model, width = w.query.shape
        new, steps = w.mix.new_empty, (n_layers, n_steps, self.batch)
        activated = new(*steps, w.inner.shape[2] + 1)
        attended = new(*steps, n_heads * width + 1)
        attended[..., -1] = activated[..., -1] = 1
        self.saved = Saved(
            states=new(n_layers + 1, *steps[1:], d_model),
            middles=new(*steps, d_model),
            sums=new(2, *steps, d_model) if w.post_norm else new(0),
            queries=new(n_steps, n_layers, n_heads * self.batch, width),
            attended=attended,
            activated=activated,
            before=new(*steps, w.inner.shape[2]),
            vectors=new(*steps[1:], d_model),
            kv=kv,
            moments=new(n_layers, n_steps, 4, self.batch),
            memory_moments=new(n_steps, 2, self.batch),
            probabilities=new(n_layers * n_heads * self.batch * n_steps * self.call.span),
        )
        self.loop = CompiledLoop(self.call, *_arguments(self.saved, w, self.call))
