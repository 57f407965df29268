"""The Feedback Transformer's fast path: the loop over tokens and layers as one autograd function, with
back-propagation through time by hand. Derivation: ``docs/feedback.md``.

The loops themselves are in ``steps.py``, in PyTorch, and ``compiled.py``, in C.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import custom_op

from memspan.errors import MemspanError
from memspan.ops.feedback import compiled as feedback_loop
from memspan.ops.feedback import steps as feedback_steps
from memspan.ops.feedback.buffers import Call, Folded, Gradients, Kept, by_slot, hidden_slots


def recurrence(
    x: Tensor,
    old: Tensor,
    length: Tensor,
    span: int,
    weights: Folded,
    *,
    activation: str = "relu",
    eps: float = 1e-5,
    compiled: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Read a segment, token by token, through all layers; pre-norm and without dropout.

    Args:
        x: ``[B, T, D]``.
        old: the newest memory vectors of what was read before, ``[B, O, D]``, newest last, ``O`` at
            least the largest ``length`` and at most ``span``.
        length: int64 ``[B]``: how many of them the row has.
        span: ``S``, how far a token sees.
        activation: ``relu`` or ``gelu``.
        compiled: whether the loops run in C (None: where they can).

    Returns:
        The last layer's output and the memory vectors, ``[B, T, D]`` each.

    Raises:
        MemspanError: the loops in C are asked for and cannot run.
    """
    n_old = old.shape[1]
    call = Call(n_old, span, activation, eps)
    if n_old and not _all_have(length, n_old):
        hidden, seen = hidden_slots(length, n_old, x.dtype)
        call = replace(call, hidden=hidden, seen=seen)
    with torch.autocast(x.device.type, enabled=False):
        if weights.norms_memory:
            old = F.layer_norm(old, old.shape[-1:], eps=eps)
        projected = F.linear(old, weights.memory.t(), weights.memory_bias).transpose(0, 1)
        x, tensors = x.transpose(0, 1), list(weights.tensors().values())
        if torch.compiler.is_compiling():
            out, vectors = _operation(
                x,
                projected,
                call.hidden,
                call.seen,
                tensors,
                weights.norms_memory,
                span,
                activation,
                eps,
                compiled,
            )
        else:
            apply: Any = _Recurrence.apply
            loops = _loops(compiled, x)
            out, vectors = apply(x, projected, call, loops, weights.norms_memory, *tensors)
    return out.transpose(0, 1), vectors.transpose(0, 1)


def _all_have(length: Tensor, n_old: int) -> bool:
    """Whether every row has ``n_old`` slots, as far as that is known without waiting for a device."""
    if torch.compiler.is_compiling() or length.device.type != "cpu":
        return False
    return bool((length >= n_old).all())


def _loops(compiled: bool | None, like: Tensor) -> ModuleType:
    """The loops in C or in PyTorch."""
    can = compiled is not False and feedback_loop.available(like)
    if compiled and not can:
        raise MemspanError(
            "the compiled implementation needs a CPU, float32 or float64, a C compiler (cc), and "
            "MEMSPAN_COMPILE other than 0: use fused"
        )
    return feedback_loop if can else feedback_steps


class _Recurrence(torch.autograd.Function):
    """The loop over tokens without a graph, and back-propagation through time by hand.

    What every step computes goes into buffers made once. Nothing outlives a call but what its own
    backward needs.
    """

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
        w = Folded.of(tensors, norms_memory)
        kept = _forward(x, old, call, loops, w)
        ctx.save_for_backward(*tensors)
        ctx.kept, ctx.norms_memory = kept, norms_memory
        ctx.call, ctx.loops = call, loops
        return kept.states[-1].clone(), kept.vectors.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_vectors: Tensor) -> tuple[Tensor | None, ...]:
        w = Folded.of(ctx.saved_tensors, ctx.norms_memory)
        d_x, d_old, *d_tensors = _backward(ctx.kept, w, ctx.call, ctx.loops, d_out, d_vectors)
        return d_x, d_old, None, None, None, *d_tensors


def _forward(x: Tensor, old: Tensor, call: Call, loops: ModuleType, w: Folded) -> Kept:
    """The loop over ``x [T, B, D]``; ``old [O, B, 2 * G * H * K]``: keys and values of memory."""
    compiled = loops is feedback_loop
    n_steps, batch, d_model = x.shape
    n_layers, n_heads, _, width = w.query.shape
    d_ff, rows, groups, n_old = w.inner.shape[2], n_heads * batch, w.n_groups, len(old)
    inner_width, new = n_heads * width, x.new_empty

    activated = new(n_layers, n_steps, batch, d_ff + 1)
    gelu = call.activation == "gelu"
    slots = (width, n_old + n_steps) if compiled else (n_old + n_steps, width)
    kept = Kept(
        states=new(n_layers + 1, n_steps, batch, d_model),
        middles=new(n_layers, n_steps, batch, d_model),
        queries=new(n_steps, n_layers, rows, width),
        attended=new(n_layers, n_steps, batch, inner_width + 1),
        activated=activated,
        before=new(n_layers, n_steps, batch, d_ff) if gelu else activated[..., :d_ff],
        vectors=new(n_steps, batch, d_model),
        kv=new(2, groups, rows, *slots),
        memory_moments=new(n_steps, 2, batch),
    )
    kept.states[0] = x
    kept.attended[..., -1] = activated[..., -1] = 1
    if n_old == 0:
        # The first token attends to nothing: that sub-layer adds zero, its bias included.
        kept.attended[:, 0] = 0
    elif call.seen is not None:
        kept.attended[:, 0, :, -1] = call.seen
    place = kept.kv.transpose(3, 4) if compiled else kept.kv
    by_slot(place[..., :n_old, :], batch).copy_(old.view(n_old, batch, 2, groups, n_heads, width))
    loops.forward(kept, w, call)
    return kept


def _backward(
    kept: Kept, w: Folded, call: Call, loops: ModuleType, d_out: Tensor, d_vectors: Tensor
) -> list[Tensor]:
    """Gradients of ``x``, ``old`` and the weights."""
    # Backward may be called under autocast, whatever forward was.
    with torch.autocast(d_out.device.type, enabled=False):
        g = loops.backward(kept, w, call, d_out, d_vectors)
        d_old = by_slot(g.kv[..., : call.n_old, :], d_out.shape[1]).flatten(2)
        return [g.first, d_old, *_weight_gradients(kept, w, g, call.eps).tensors().values()]


def _weight_gradients(kept: Kept, w: Folded, g: Gradients, eps: float) -> Folded:
    """What ends in weights does not depend on the recurrence: one product each for all steps."""
    n_layers, n_heads, d_model, width = w.query.shape
    query, output, inner, outer = [], [], [], []
    for n in range(n_layers):
        z = F.layer_norm(kept.states[n], (d_model,), eps=eps).flatten(0, 1)
        query.append(z.t() @ g.query[n].flatten(0, 1))
        output.append(kept.attended[n].flatten(0, 1).t() @ g.middles[n].flatten(0, 1))
        z = F.layer_norm(kept.middles[n], (d_model,), eps=eps).flatten(0, 1)
        inner.append(z.t() @ g.inner[n].flatten(0, 1))
        outer.append(kept.activated[n].flatten(0, 1).t() @ g.states[n].flatten(0, 1))
    vectors = kept.vectors
    if w.norms_memory:
        vectors = F.layer_norm(vectors, (d_model,), eps=eps)
    return Folded(
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
        mix=kept.states.flatten(1) @ g.mixed.flatten(),
    )


# ----- The same as one operation of a compiled graph, where torch.compile looks at no loop


def _run(
    x: Tensor,
    old: Tensor,
    hidden: Tensor | None,
    seen: Tensor | None,
    tensors: list[Tensor],
    norms_memory: bool,
    span: int,
    activation: str,
    eps: float,
    compiled: bool | None,
) -> tuple[Tensor, Tensor]:
    call, w = Call(len(old), span, activation, eps, hidden, seen), Folded.of(tensors, norms_memory)
    kept = _forward(x, old, call, _loops(compiled, x), w)
    return kept.states[-1].clone(), kept.vectors


def _run_backward(
    x: Tensor,
    old: Tensor,
    hidden: Tensor | None,
    seen: Tensor | None,
    tensors: list[Tensor],
    norms_memory: bool,
    span: int,
    activation: str,
    eps: float,
    compiled: bool | None,
    d_out: Tensor,
    d_vectors: Tensor,
) -> list[Tensor]:
    # An operation keeps nothing but tensors: its forward is run again.
    call, w = Call(len(old), span, activation, eps, hidden, seen), Folded.of(tensors, norms_memory)
    loops = _loops(compiled, x)
    kept = _forward(x, old, call, loops, w)
    return [g.contiguous() for g in _backward(kept, w, call, loops, d_out, d_vectors)]


def _shapes(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _shapes_backward(
    x: Tensor, old: Tensor, hidden: Any, seen: Any, tensors: list[Tensor], *_: Any
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in (x, old, *tensors)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, old, hidden, seen, tensors, *ctx.options = inputs
    ctx.save_for_backward(x, old, hidden, seen, *tensors)


def _operation_gradients(ctx: Any, d_out: Tensor, d_vectors: Tensor) -> tuple[Any, ...]:
    x, old, hidden, seen, *tensors = ctx.saved_tensors
    d_x, d_old, *d_tensors = _operation_backward(
        x, old, hidden, seen, tensors, *ctx.options, d_out, d_vectors
    )
    return d_x, d_old, None, None, d_tensors, *[None] * len(ctx.options)


_operation = custom_op("memspan::feedback_recurrence", _run, mutates_args=())
_operation.register_fake(_shapes)
_operation.register_autograd(_operation_gradients, setup_context=_save)
_operation_backward = custom_op(
    "memspan::feedback_recurrence_backward", _run_backward, mutates_args=()
)
_operation_backward.register_fake(_shapes_backward)
