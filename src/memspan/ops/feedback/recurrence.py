"""The Feedback Transformer's fast path: the loop over tokens and layers as one autograd function, with
hand-written back-propagation through time, derived in ``docs/annotated/feedback_backward.md``.

The loops are in ``steps.py``, in PyTorch, and ``compiled.py``, in C.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import custom_op
from torch.utils._pytree import tree_flatten, tree_unflatten

from memspan.devices import can_look
from memspan.errors import MemspanError
from memspan.ops.feedback import compiled, steps
from memspan.ops.feedback.buffers import (
    Call,
    FoldedWeights,
    Forward,
    Gradients,
    Saved,
    by_slot,
    mask_of_old_slots,
)
from memspan.ops.feedback.dropout import Kept
from memspan.ops.implementations import Implementation, check_together, choose

IMPLEMENTATIONS: dict[str, Implementation[Tensor, ModuleType]] = {
    "compiled": Implementation(lambda x: compiled, compiled.obstacle),
    "fused": Implementation(lambda x: steps),
}
"""The modules that have both loops, ``prepare`` and ``backward``, and ``new_slots``, by preference.
``compiled``: the loops in C, on a CPU, in float32 or float64, with a C compiler.
``fused``: the loops in PyTorch, on any device. The reference is ``Feedback`` in
``models/feedback/model.py``."""


# Nine parameters: ``Call`` groups the options, but is made here, where the mask of old slots is known.
def feedback_recurrence(
    x: Tensor,
    old: Tensor,
    length: Tensor,
    span: int,
    weights: FoldedWeights,
    *,
    activation: str = "relu",
    eps: float = 1e-5,
    kept: Kept | None = None,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Read a segment, token by token, through all layers (Fan et al. 2020).

    Args:
        x: ``[B, T, D]``.
        old: memory vectors of the tokens before, ``[B, O, D]``, newest last, ``O`` at least the
            largest ``length`` and at most ``span``.
        length: int64 ``[B]``: how many of them each row has.
        span: ``S``, the earlier tokens that a token attends to.
        weights: of the stack, folded.
        activation: ``relu`` or ``gelu``.
        eps: of every norm.
        kept: by dropout (None: all).
        implementation: a name from :data:`IMPLEMENTATIONS`; None: the first that can run.

    Returns:
        The last layer's output and the memory vectors, ``[B, T, D]`` each.

    Raises:
        MemspanError: shapes, types or devices do not go together; the implementation does not exist or
            cannot run; there is not enough memory.
    """
    _check(x, old, length, span, weights)
    n_old = old.shape[1]
    call = Call(n_old, span, activation, eps, kept=kept)
    if n_old and not _all_have(length, n_old):
        additive_mask, has_memory = mask_of_old_slots(length, n_old, x.dtype)
        call = call._replace(additive_mask=additive_mask, has_memory=has_memory)
    with torch.autocast(x.device.type, enabled=False):
        if weights.norms_memory:
            old = F.layer_norm(old, old.shape[-1:], eps=eps)
        projected = F.linear(old, weights.memory.t(), weights.memory_bias).transpose(0, 1)
        x, tensors = x.transpose(0, 1), list(weights.tensors().values())
        if torch.compiler.is_compiling():
            masks, scales = call.masks(x)
            options = (scales, weights.norms_memory, span, activation, eps, implementation)
            out, vectors = _operation([x, projected, *tensors], masks, *options)
        else:
            apply: Any = _Recurrence.apply
            loops = choose(IMPLEMENTATIONS, implementation, x)(x)
            out, vectors = apply(x, projected, call, loops, weights.norms_memory, *tensors)
    return out.transpose(0, 1), vectors.transpose(0, 1)


def _check(x: Tensor, old: Tensor, length: Tensor, span: int, weights: FoldedWeights) -> None:
    """Raise :class:`MemspanError` where a segment, its memory and the weights do not go together."""
    check_together(True, x=x, old=old, **weights.tensors())
    weights.check(span)
    d_model = weights.query.shape[2]
    if x.dim() != 3 or not x.shape[1] or x.shape[2] != d_model:
        raise MemspanError(f"x must be [B, T, {d_model}] with at least one token, not {[*x.shape]}")
    if old.dim() != 3 or len(old) != len(x) or old.shape[1] > span or old.shape[2] != d_model:
        raise MemspanError(
            f"the memory vectors must be [{len(x)}, O, {d_model}], O at most the span {span}, not "
            f"{[*old.shape]}"
        )
    if length.dtype != torch.int64 or length.shape != (len(x),) or length.device != x.device:
        raise MemspanError(
            f"length must be int64 [{len(x)}] on {x.device}, not "
            f"{str(length.dtype).removeprefix('torch.')} {[*length.shape]} on {length.device}"
        )
    if (
        can_look(length)
        and len(x)
        and not 0 <= int(length.min()) <= int(length.max()) <= len(old[0])
    ):
        raise MemspanError(
            f"length must lie in 0 .. {len(old[0])}, the memory vectors that there are, not "
            f"{int(length.min())} .. {int(length.max())}"
        )


def _all_have(length: Tensor, n_old: int) -> bool:
    """Whether every row has ``n_old`` slots, as far as that is known without waiting for a device."""
    if torch.compiler.is_compiling() or length.device.type != "cpu":
        return False
    return bool((length >= n_old).all())


class _Recurrence(torch.autograd.Function):
    """The loop over tokens without a graph. Every step writes to buffers that are made once; only what
    its own backward needs outlives a call."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        old: Tensor,
        call: Call,
        loops: ModuleType,
        norms_memory: bool,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        w = FoldedWeights.of(tensors, norms_memory)
        saved = _forward(x, old, call, loops, w)
        # All tensors where activation checkpointing finds them, dropout's among them.
        masks, ctx.scales = call.masks(x)
        own, ctx.layout = tree_flatten(vars(saved))
        ctx.save_for_backward(*tensors, *masks, *own)
        ctx.ends = len(tensors), len(tensors) + len(masks)
        ctx.call = call._replace(additive_mask=None, has_memory=None, kept=None)
        ctx.norms_memory, ctx.loops = norms_memory, loops
        return saved.states[-1].clone(), saved.vectors.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_vectors: Tensor) -> tuple[Tensor | None, ...]:
        given, (first, second) = ctx.saved_tensors, ctx.ends
        w = FoldedWeights.of(given[:first], ctx.norms_memory)
        call = ctx.call.with_masks(given[first:second], ctx.scales)
        saved = Saved(**tree_unflatten(given[second:], ctx.layout))
        d_x, d_old, *d_tensors = _backward(saved, w, call, ctx.loops, d_out, d_vectors)
        return d_x, d_old, None, None, None, *d_tensors


def _forward(x: Tensor, old: Tensor, call: Call, loops: ModuleType, w: FoldedWeights) -> Saved:
    """The loop over ``x [T, B, D]``; ``old [O, B, 2 * G * H * K]``: keys and values of memory."""
    n_steps, batch, _ = x.shape
    n_heads, _, width = w.query.shape[1:]
    n_old, groups = len(old), w.n_groups
    kv = loops.new_slots(x, groups, n_heads * batch, n_old + n_steps, width)
    saved = Saved.empty(w, call, n_steps, batch, kv)
    saved.states[0] = x
    if n_old == 0:
        # The first token attends to nothing: that sub-layer adds zero, its bias included.
        saved.attended[:, 0] = 0
    elif call.has_memory is not None:
        saved.attended[:, 0, :, -1] = call.has_memory
    by_slot(kv[..., :n_old, :], batch).copy_(old.view(n_old, batch, 2, groups, n_heads, width))
    loops.prepare(saved, w, call)(call, kv)
    return saved


def _backward(
    saved: Saved, w: FoldedWeights, call: Call, loops: ModuleType, d_out: Tensor, d_vectors: Tensor
) -> list[Tensor]:
    """Gradients of ``x``, ``old`` and the weights."""
    # Backward may be called under autocast, whatever forward was.
    with torch.autocast(d_out.device.type, enabled=False):
        g = loops.backward(saved, w, call, d_out, d_vectors)
        d_old = by_slot(g.kv[..., : call.n_old, :], d_out.shape[1]).flatten(2)
        return [g.first, d_old, *_weight_gradients(saved, w, g, call.eps).tensors().values()]


def _weight_gradients(saved: Saved, w: FoldedWeights, g: Gradients, eps: float) -> FoldedWeights:
    """What ends in weights does not depend on the recurrence: one product each for all steps."""
    n_layers, n_heads, d_model, width = w.query.shape
    query, output, inner, outer = [], [], [], []

    def normalised(x: Tensor) -> Tensor:
        return F.layer_norm(x, (d_model,), eps=eps)

    for n in range(n_layers):
        given = saved.states[n], saved.middles[n]
        z, middle = (x if w.post_norm else normalised(x) for x in given)
        query.append(z.flatten(0, 1).t() @ g.query[n].flatten(0, 1))
        output.append(saved.attended[n].flatten(0, 1).t() @ g.attention[n].flatten(0, 1))
        inner.append(middle.flatten(0, 1).t() @ g.inner[n].flatten(0, 1))
        outer.append(saved.activated[n].flatten(0, 1).t() @ g.feed_forward[n].flatten(0, 1))
    vectors = normalised(saved.vectors) if w.norms_memory else saved.vectors
    gains, biases = torch.zeros_like(w.gains), torch.zeros_like(w.biases)
    if w.post_norm:
        for part, d in enumerate((g.middles, g.states)):
            torch.sum(d * normalised(saved.sums[part]), (1, 2), out=gains[part])
            torch.sum(d, (1, 2), out=biases[part])
    return FoldedWeights(
        query=torch.stack(query).view(n_layers, d_model, n_heads, width).transpose(1, 2),
        query_bias=g.query.sum((1, 2)).view(n_layers, n_heads, 1, width),
        position_keys=g.position_keys,
        position_scores=g.position_scores,
        output=torch.stack(output),
        inner=torch.stack(inner),
        inner_bias=g.inner.sum((1, 2)),
        outer=torch.stack(outer),
        memory=vectors.flatten(0, 1).t() @ g.projected.flatten(0, 1),
        memory_bias=g.projected.sum((0, 1)),
        mix=saved.states.flatten(1) @ g.mixed.flatten(),
        gains=gains,
        biases=biases,
    )


class StreamingLoop:
    """The loop without gradients, for frozen weights and one number of rows. Its buffers are made once
    for a length."""

    def __init__(
        self, weights: FoldedWeights, batch: int, span: int, activation: str, eps: float
    ) -> None:
        tensors = [t.contiguous() for t in weights.tensors().values()]
        self.weights, self.batch = FoldedWeights.of(tensors, weights.norms_memory), batch
        # As large as calls become.
        self.call = Call(span, span, activation, eps)
        self.loops = choose(IMPLEMENTATIONS, None, weights.mix)(weights.mix)
        self.saved: Saved | None = None
        self._forward: Forward | None = None
        # Whether the last call had rows of different length.
        self._masked = False

    def read(
        self, x: Tensor, kv: Tensor, end: int, n_old: int, length: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Read ``x [B, T, D]``; its keys and values are written at ``end``.

        Args:
            kv: ``[2, G, H * B, N, K]`` of ``new_slots``, with room for ``T`` slots from ``end`` on.
            n_old: slots before ``end`` that the first token may see.
            length: int64 ``[B]``: how many of them a row has (None: all).

        Returns:
            The last layer's output ``[B, T, D]`` and the memory vectors ``[T, B, D]``, until the next
            call.
        """
        n_steps, additive_mask, has_memory = x.shape[1], None, None
        if length is not None:
            additive_mask, has_memory = mask_of_old_slots(length, n_old, x.dtype)
        if self.saved is None or self.saved.states.shape[1] != n_steps:
            self.saved = Saved.empty(self.weights, self.call, n_steps, self.batch, kv)
            self._forward = self.loops.prepare(self.saved, self.weights, self.call)
        assert self._forward is not None
        if self._masked or length is not None:
            self.saved.attended[:, 0, :, -1] = 1 if has_memory is None else has_memory
        self._masked = length is not None
        self.saved.states[0] = x.transpose(0, 1)
        call = self.call._replace(n_old=n_old, additive_mask=additive_mask, has_memory=has_memory)
        self._forward(call, kv, end - n_old)
        return self.saved.states[-1].transpose(0, 1), self.saved.vectors


# ----- The same as one operation of a graph, for torch.compile. ``given``: x, old and the weights;
# ``masks`` and ``scales``: of ``Call.masks``. Eagerly the function above costs less. An operation takes
# tensors and plain values only, so what ``Call`` groups is many parameters here.


def _graph_loop(
    given: list[Tensor], masks: list[Tensor], scales: list[float], norms_memory: bool, *rest: Any
) -> tuple[Saved, FoldedWeights, Call, ModuleType]:
    x, old, *tensors = given
    *options, implementation = rest
    call = Call(len(old), *options).with_masks(masks, scales)
    w = FoldedWeights.of(tensors, norms_memory)
    loops = choose(IMPLEMENTATIONS, implementation, x)(x)
    return _forward(x, old, call, loops, w), w, call, loops


def _graph_forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    saved = _graph_loop(*inputs)[0]
    return saved.states[-1].clone(), saved.vectors


def _graph_backward(*inputs: Any) -> list[Tensor]:
    # An operation saves tensors only: its forward is run again.
    *given, upstream = inputs
    return [g.contiguous() for g in _backward(*_graph_loop(*given), *upstream)]


def _empty_outputs(given: list[Tensor], *_: Any) -> tuple[Tensor, Tensor]:
    return given[0].new_empty(given[0].shape), given[0].new_empty(given[0].shape)


def _empty_gradients(given: list[Tensor], *_: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in given]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    given, masks, *ctx.options = inputs
    ctx.n_given = len(given)
    ctx.save_for_backward(*given, *masks)


def _graph_gradients(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
    tensors, n = list(ctx.saved_tensors), ctx.n_given
    d_given = _operation_backward(tensors[:n], tensors[n:], *ctx.options, list(upstream))
    return d_given, [None] * len(tensors[n:]), *[None] * len(ctx.options)


# Written out: torch 2.6 cannot infer a schema from list[Tensor].
_SCHEMA = (
    "Tensor[] given, Tensor[] masks, float[] scales, bool norms_memory, int span, str activation, "
    "float eps, str? implementation"
)
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
