"""The Feedback Transformer's fast path: the loop over tokens and layers as one autograd function, with
hand-written backpropagation through time, derived in ``docs/annotated/feedback_backward.md``.

The loops are in ``steps.py``, in PyTorch, and ``compiled.py``, in C.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from memspan.errors import MemspanError
from memspan.ops.feedback import compiled, graphs, programs, steps
from memspan.ops.feedback.buffers import (
    Buffers,
    FoldedWeights,
    Options,
    by_slot,
    new_buffers,
    new_gradients,
)
from memspan.ops.feedback.dropout import NO_DROPOUT, Dropout
from memspan.ops.first_derivatives import apply, first_derivatives_only
from memspan.ops.implementations import Implementation, check_name, check_together, choose

IMPLEMENTATIONS: dict[str, Implementation[Tensor, ModuleType]] = {
    "compiled": Implementation(lambda x: compiled, compiled.obstacle),
    "graph": Implementation(lambda x: graphs, graphs.obstacle, suits=lambda x: False),
    "triton": Implementation(lambda x: programs, programs.obstacle, suits=lambda x: False),
    "fused": Implementation(lambda x: steps),
}
"""The modules that have both loops, ``prepare`` and ``backward``, and ``new_slots``, by preference.
``compiled``: the loops in C, on a CPU, in float32 or float64. ``fused``: the loops in PyTorch, on any
device. ``graph``: these as CUDA graphs. ``triton``: a program per row, in float32 or bfloat16. These
two by name alone, since nobody has run them on a GPU. The reference is ``Feedback``'s loop over
``models/feedback/layer.py``."""


def feedback_recurrence(
    x: Tensor,
    old: Tensor,
    visible: Tensor | None,
    span: int,
    weights: FoldedWeights,
    *,
    activation: Literal["relu", "gelu"] = "relu",
    eps: float = 1e-5,
    kept: Dropout | None = None,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Read a segment, token by token, through all layers (Fan et al. 2020).

    Args:
        x: ``[B, T, D]``.
        old: memory vectors of the tokens before, ``[B, O, D]``, newest last, ``O`` at most ``span``.
        visible: int64 ``[B, T]``: the number of tokens just before it that each token sees, of the
            segment and of ``old``; all ``span`` or that there are where it is larger (None:
            everywhere). Where a document starts it is 0, and then it grows by one for each token.
        span: ``S``, the earlier tokens that a token attends to.
        weights: of the stack, folded.
        activation: ``relu`` or ``gelu``.
        eps: of every norm.
        kept: by dropout (None: all).
        implementation: a name from :data:`IMPLEMENTATIONS`; None: the first that can run.

    Returns:
        The last layer's output and the memory vectors, ``[B, T, D]`` each.

    Raises:
        MemspanError: shapes, types or devices do not go together; the activation or the implementation
            does not exist, or the latter cannot run; there is not enough memory.
    """
    check_name("activation", activation, "relu", "gelu")
    _check(x, old, visible, span, weights)
    if not x.shape[0]:
        # The results are as empty.
        choose(IMPLEMENTATIONS, implementation, x)
        return x.clone(), x.clone()
    kept = kept or NO_DROPOUT
    masks = {
        f"kept_{name}": mask
        for name, mask in zip(Dropout._fields, kept, strict=True)
        if isinstance(mask, Tensor)
    }
    if visible is not None:
        masks["visible"] = visible.t().contiguous()
    options = Options(span, activation, eps, weights.norms_memory, kept.weights_scale, kept.scale)
    with torch.autocast(x.device.type, enabled=False):
        if weights.norms_memory:
            old = F.layer_norm(old, old.shape[-1:], eps=eps)
        projected = F.linear(old, weights.memory.t(), weights.memory_bias).transpose(0, 1)
        given = {"x": x.transpose(0, 1), "projected": projected, **weights.tensors(), **masks}
        names = list(given)
        tensors = list(given.values())
        if torch.compiler.is_compiling():
            out, vectors = _operation(tensors, names, *options, implementation)
        else:
            loops = choose(IMPLEMENTATIONS, implementation, x)(x)
            out, vectors = apply(_Recurrence, loops, options, names, *tensors)
    return out.transpose(0, 1), vectors.transpose(0, 1)


def _check(
    x: Tensor, old: Tensor, visible: Tensor | None, span: int, weights: FoldedWeights
) -> None:
    """Raise :class:`MemspanError` where a segment, its memory and the weights do not go together."""
    check_together(True, x=x, old=old, **weights.tensors())
    weights.check(span)
    d_model = weights.query.shape[2]
    if x.dim() != 3 or not x.shape[1] or x.shape[2] != d_model:
        raise MemspanError(f"x must be [B, T, {d_model}] with at least one token, not {[*x.shape]}")
    if (
        old.dim() != 3
        or old.shape[0] != x.shape[0]
        or old.shape[1] > span
        or old.shape[2] != d_model
    ):
        raise MemspanError(
            f"the memory vectors must be [{x.shape[0]}, O, {d_model}], O at most the span {span}, not "
            f"{[*old.shape]}"
        )
    if visible is None:
        return
    if visible.dtype != torch.int64 or visible.shape != x.shape[:2] or visible.device != x.device:
        raise MemspanError(
            f"visible must be int64 {[*x.shape[:2]]} on {x.device}, not "
            f"{str(visible.dtype).removeprefix('torch.')} {[*visible.shape]} on {visible.device}"
        )


class _Recurrence(torch.autograd.Function):
    """The loop over tokens without a graph. Every step writes to buffers that are made once; only what
    its own backward needs outlives a call."""

    @staticmethod
    def forward(
        ctx: Any, loops: ModuleType, options: Options, names: list[str], *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        b = _forward(loops, options, dict(zip(names, tensors, strict=True)))
        # All tensors where activation checkpointing finds them, dropout's among them.
        ctx.save_for_backward(*b.values())
        ctx.loops = loops
        ctx.options = options
        ctx.names = list(b)
        return b["streams"][-1].clone(), b["vectors"].clone()

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        b = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        gradients = _backward(ctx.loops, ctx.options, b, *upstream)
        n_masks = len(ctx.needs_input_grad) - 3 - len(gradients)
        return None, None, None, *gradients, *[None] * n_masks


def _forward(loops: ModuleType, options: Options, b: Buffers) -> Buffers:
    """The loop over ``x [T, B, D]`` and ``projected [O, B, 2 * G * H * K]``, keys and values of memory:
    the rest of ``b``, weights and masks, with all that the loop leaves."""
    x = b.pop("x")
    old = b.pop("projected")
    n_steps, batch, _ = x.shape
    n_heads, _, width = b["query"].shape[1:]
    n_old = len(old)
    groups = old.shape[2] // (2 * n_heads * width)
    b |= new_buffers(b, options, n_steps, batch, n_old)
    b["kv"] = loops.new_slots(x, groups, n_heads * batch, n_old + n_steps, width)
    b["streams"][0] = x
    # A token that attends to nothing: that sub-layer adds zero, its bias included.
    if "visible" in b:
        b["attended"][..., -1] = b["visible"] > 0
    if n_old == 0:
        b["attended"][:, 0] = 0
    old = old.view(n_old, batch, 2, groups, n_heads, width)
    by_slot(b["kv"][..., :n_old, :], batch).copy_(old)
    loops.prepare(b, options)(b)
    return b


def _backward(
    loops: ModuleType, options: Options, b: Buffers, d_out: Tensor, d_vectors: Tensor
) -> list[Tensor]:
    """Gradients of ``x``, ``projected`` and the weights."""
    # Backward may be called under autocast, whatever forward was.
    with torch.autocast(d_out.device.type, enabled=False):
        d = new_gradients(b, d_out, d_vectors)
        loops.backward(b, options, d)
        n_steps, batch, _ = d_out.shape
        d_old = by_slot(d["d_kv"][..., : b["kv"].shape[3] - n_steps, :], batch).flatten(2)
        return [
            d["d_streams"][0].clone(),
            d_old,
            *_weight_gradients(b, options, d).tensors().values(),
        ]


def _weight_gradients(b: Buffers, options: Options, d: Buffers) -> FoldedWeights:
    """Gradients of the weights, one product each for all steps: the recurrence does not need them."""
    n_layers, n_heads, d_model, width = b["query"].shape
    streams = b["streams"]
    post_norm = "sums" in b

    def normalised(x: Tensor) -> Tensor:
        return F.layer_norm(x, (d_model,), eps=options.eps)

    def products(a: Tensor, g: Tensor, norm: bool = False) -> Tensor:
        """``a_l^T g_l``, summed over steps and rows, of each layer ``l``."""
        pairs = zip(a, g, strict=True)
        return torch.stack(
            [(normalised(x) if norm else x).flatten(0, 1).t() @ y.flatten(0, 1) for x, y in pairs]
        )

    vectors = normalised(b["vectors"]) if options.norms_memory else b["vectors"]
    gains = torch.zeros_like(b["gains"])
    biases = torch.zeros_like(b["biases"])
    if post_norm:
        for part, g in enumerate((d["d_streams"][1::2], d["d_streams"][2::2])):
            torch.sum(g * normalised(b["sums"][part::2]), (1, 2), out=gains[part])
            torch.sum(g, (1, 2), out=biases[part])
    query = products(streams[:-1:2], d["d_query"], not post_norm)
    return FoldedWeights(
        query=query.view(n_layers, d_model, n_heads, width).transpose(1, 2),
        query_bias=d["d_query"].sum((1, 2)).view(n_layers, n_heads, 1, width),
        position_keys=d["d_position_keys"],
        position_scores=d["d_position_scores"],
        output=products(b["attended"], d["d_added"][::2]),
        inner=products(streams[1::2], d["d_inner"], not post_norm),
        inner_bias=d["d_inner"].sum((1, 2)),
        outer=products(b["activated"], d["d_added"][1::2]),
        memory=products(vectors[None], d["d_projected"][None])[0],
        memory_bias=d["d_projected"].sum((0, 1)),
        mix=streams[::2].flatten(1) @ d["d_vectors"].flatten(),
        gains=gains,
        biases=biases,
    )


class StreamingLoop:
    """The loop without gradients, for frozen weights and one number of rows. Its buffers are made once
    for a length."""

    def __init__(
        self, weights: FoldedWeights, batch: int, span: int, activation: str, eps: float
    ) -> None:
        self.weights = {name: t.contiguous() for name, t in weights.tensors().items()}
        self.options = Options(span, activation, eps, weights.norms_memory)
        self.loops = choose(IMPLEMENTATIONS, None, weights.mix)(weights.mix)
        self.batch = batch
        self._buffers: Buffers | None = None
        self._forward: Callable[[Buffers], None]
        # True if not every token of the last call saw all.
        self._masked = False

    def read(self, x: Tensor, kv: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
        """Read ``x [B, T, D]``; its keys and values are written to the last slots.

        Args:
            kv: ``[2, G, H * B, O + T, K]``, part of ``new_slots``: the slots that the first token may
                see, and those of the segment.
            visible: as that of :func:`feedback_recurrence`.

        Returns:
            The last layer's output ``[B, T, D]`` and the memory vectors ``[T, B, D]``, until the next
            call.
        """
        n_steps = x.shape[1]
        given: Buffers = {"kv": kv}
        if visible is not None:
            given["visible"] = visible.t().contiguous()
        if self._buffers is None or len(self._buffers["vectors"]) != n_steps:
            # As large as calls become.
            sizes = (n_steps, self.batch, self.options.span)
            buffers = self.weights | new_buffers(self.weights, self.options, *sizes)
            self._forward = self.loops.prepare(buffers, self.options)
            self._buffers = buffers
        if self._masked or visible is not None:
            self._buffers["attended"][..., -1] = 1 if visible is None else given["visible"] > 0
        self._masked = visible is not None
        self._buffers["streams"][0] = x.transpose(0, 1)
        self._forward(given)
        return self._buffers["streams"][-1].transpose(0, 1), self._buffers["vectors"]


# ----- The same as one operation of a graph, for torch.compile: of tensors and plain values only.
# Eagerly the function above costs less.

N_GRADIENTS = 1 + len(fields(FoldedWeights))
"""Gradients of ``x``, ``projected`` and the weights: all tensors but masks."""


def _graph_loop(
    tensors: list[Tensor], names: list[str], *rest: Any
) -> tuple[ModuleType, Options, Buffers]:
    *options, implementation = rest
    loops = choose(IMPLEMENTATIONS, implementation, tensors[0])(tensors[0])
    given = dict(zip(names, tensors, strict=True))
    return loops, Options(*options), _forward(loops, Options(*options), given)


# Written out, since the functions take these as ``*inputs``.
_SCHEMA = (
    "Tensor[] tensors, str[] names, int span, str activation, float eps, bool norms_memory, "
    "float weights_scale, float scale, str? implementation"
)


def _graph_forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    b = _graph_loop(*inputs)[2]
    return b["streams"][-1].clone(), b["vectors"]


def _graph_backward(*inputs: Any) -> list[Tensor]:
    # An operation saves tensors only: its forward is run again.
    *given, upstream = inputs
    return [g.contiguous() for g in _backward(*_graph_loop(*given), *upstream)]


def _empty_outputs(tensors: list[Tensor], *_: Any) -> tuple[Tensor, Tensor]:
    return tensors[0].new_empty(tensors[0].shape), tensors[0].new_empty(tensors[0].shape)


def _empty_gradients(tensors: list[Tensor], *_: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in tensors[:N_GRADIENTS]]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, *ctx.options = inputs
    ctx.save_for_backward(*tensors)


def _graph_gradients(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
    tensors = list(ctx.saved_tensors)
    gradients = _operation_backward(tensors, *ctx.options, list(upstream))
    return [*gradients, *[None] * (len(tensors) - len(gradients))], *[None] * len(ctx.options)


_operation = custom_op(
    "memspan::feedback_recurrence",
    _graph_forward,
    mutates_args=(),
    schema=f"({_SCHEMA}) -> (Tensor, Tensor)",
)
_operation.register_fake(_empty_outputs)
_operation.register_autograd(_graph_gradients, setup_context=_save)
_operation_backward = custom_op(
    "memspan::feedback_recurrence_backward",
    _graph_backward,
    mutates_args=(),
    schema=f"({_SCHEMA}, Tensor[] upstream) -> Tensor[]",
)
_operation_backward.register_fake(_empty_gradients)
