"""The Feedback Transformer's fast path: the loop over tokens and layers as one autograd function, with
back-propagation through time by hand. Derivation: ``docs/feedback.md``.

The loops themselves are in ``feedback_steps.py``, in PyTorch, and ``feedback_loop.py``, in C.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from memspan.ops import feedback_loop, feedback_steps
from memspan.ops.feedback_buffers import Call, Folded, Gradients, Kept, by_slot, hidden_slots


def recurrence(
    x: Tensor,
    old: Tensor,
    length: Tensor,
    span: int,
    weights: Folded,
    *,
    activation: str = "relu",
    eps: float = 1e-5,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Read a segment, token by token, through all layers; pre-norm and without dropout.

    Args:
        x: ``[B, T, D]``.
        old: the newest memory vectors of what was read before, ``[B, O, D]``, newest last, ``O`` at
            least the largest ``length`` and at most ``span``.
        length: int64 ``[B]``: how many of them the row has.
        span: ``S``, how far a token sees.
        activation: ``relu`` or ``gelu``.
        compiled: run the loops in C, where :func:`memspan.ops.feedback_loop.available`.

    Returns:
        The last layer's output and the memory vectors, ``[B, T, D]`` each.
    """
    n_old = old.shape[1]
    call = Call(n_old, span, activation, eps)
    if bool((length < n_old).any()):
        hidden, seen = hidden_slots(length, n_old, x.dtype)
        call = replace(call, hidden=hidden, seen=seen)
    with torch.autocast(x.device.type, enabled=False):
        if weights.norms_memory:
            old = F.layer_norm(old, old.shape[-1:], eps=eps)
        projected = F.linear(old, weights.memory.t(), weights.memory_bias).transpose(0, 1)
        apply: Any = _Recurrence.apply
        out, vectors = apply(
            x.transpose(0, 1),
            projected,
            call,
            feedback_loop if compiled else feedback_steps,
            weights.norms_memory,
            *weights.tensors().values(),
        )
    return out.transpose(0, 1), vectors.transpose(0, 1)


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
        by_slot(place[..., :n_old, :], batch).copy_(
            old.view(n_old, batch, 2, groups, n_heads, width)
        )
        loops.forward(kept, w, call)
        ctx.save_for_backward(*tensors)
        ctx.kept, ctx.norms_memory = kept, norms_memory
        ctx.call, ctx.loops = call, loops
        return kept.states[-1].clone(), kept.vectors.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_vectors: Tensor) -> tuple[Tensor | None, ...]:
        # Backward may be called under autocast, whatever forward was.
        with torch.autocast(d_out.device.type, enabled=False):
            w = Folded.of(ctx.saved_tensors, ctx.norms_memory)
            kept = ctx.kept
            g = ctx.loops.backward(kept, w, ctx.call, d_out, d_vectors)
            return (
                g.first,
                by_slot(g.kv[..., : ctx.call.n_old, :], d_out.shape[1]).flatten(2),
                *[None] * 3,
                *_weight_gradients(kept, w, g, ctx.call.eps).tensors().values(),
            )


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
