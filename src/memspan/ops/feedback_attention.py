"""The Feedback Transformer's attention (Fan et al. 2020, section 3) and its fast path.

A token attends to the memory vectors of the ``S`` tokens before it, one of each. With ``d = 1 .. S``
the distance back, ``k`` and ``v`` the keys and values of the memory vectors::

    A_d = ( (q + u) . k_d  +  q . R_d  +  S_d ) / sqrt(K)        attention = softmax_d(A) v

:func:`attend` is this equation; the loop over tokens and layers around it, in plain autograd, is
``FeedbackTransformer`` in ``models/feedback.py``, which is the reference. :func:`recurrence` is that
whole loop as one autograd function: see ``docs/feedback.md`` for its derivation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from memspan.ops.feedback_loop import CompiledLoop


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_keys: Tensor,
    position_scores: Tensor,
    content_bias: Tensor,
    visible: Tensor,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of one token per row.

    Args:
        q: queries ``[B, H, K]``.
        k: keys ``[B, H, S, K]`` of the tokens before, newest last; likewise ``v``.
        position_keys: ``R``, ``[P, H, K]`` with ``P >= S``; row ``d - 1`` belongs to distance ``d``.
        position_scores: ``S_d``, ``[P, H]``, likewise.
        content_bias: ``u``, ``[H, K]``.
        visible: bool ``[B, S]``, true where there is a token. A row that sees none gets zero.
        dropout: probability with which an attention weight is dropped.

    Returns:
        ``[B, H, K]``.
    """
    slots, width = k.shape[2:]
    by_distance = position_keys[:slots].flip(0), position_scores[:slots].flip(0)
    scores = torch.einsum("bhk,bhsk->bhs", q + content_bias, k)
    scores = scores + torch.einsum("bhk,shk->bhs", q, by_distance[0]) + by_distance[1].t()
    scores = scores * width**-0.5
    # The lowest number, not -inf: a row that sees nothing must not turn into NaN.
    scores = scores.masked_fill(~visible[:, None], torch.finfo(scores.dtype).min)
    weights = F.dropout(scores.softmax(-1), dropout) * visible.any(-1)[:, None, None]
    return torch.einsum("bhs,bhsk->bhk", weights, v)


@dataclass(frozen=True)
class Folded:
    """All weights of a stack, each the layers' one above the other, with the constant parts folded in.

    Folded are: each norm's gain and bias, into the product that follows; ``1 / sqrt(K)`` and ``u``,
    into the query; ``u . R_d``, out of the position scores; biases that follow a product with a
    residual sum, as a last row that meets a constant one. ``G`` is 1 where all layers share keys and
    values, else ``L``.
    """

    query: Tensor
    """``[L, H, D, K]``."""
    query_bias: Tensor
    """``[L, H, 1, K]``."""
    position_keys: Tensor
    """``[L, H, K, S]``, farthest first."""
    position_scores: Tensor
    """``[L, H, 1, S]``, farthest first."""
    output: Tensor
    """``[L, H * K + 1, D]``."""
    inner: Tensor
    """``[L, D, F]``."""
    inner_bias: Tensor
    """``[L, F]``."""
    outer: Tensor
    """``[L, F + 1, D]``."""
    memory: Tensor
    """Keys, then values: ``[D, 2 * G * H * K]``."""
    memory_bias: Tensor
    """``[2 * G * H * K]``."""
    mix: Tensor
    """Weights of a token's states in its memory vector, ``[L + 1]``."""
    norms_memory: bool = False
    """Whether memory vectors are normalised before the projections."""

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "norms_memory"}

    @classmethod
    def of(cls, tensors: Sequence[Tensor], norms_memory: bool) -> Folded:
        """From the values of :meth:`tensors`."""
        names = [f.name for f in fields(cls) if f.name != "norms_memory"]
        named: dict[str, Any] = dict(zip(names, tensors, strict=True))
        return cls(**named, norms_memory=norms_memory)

    @property
    def n_groups(self) -> int:
        n_heads, _, width = self.query.shape[1:]
        return self.memory.shape[1] // (2 * n_heads * width)


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
    hidden = seen = None
    if bool((length < n_old).any()):
        hidden, seen = _hidden(length, n_old, x.dtype)
    with torch.autocast(x.device.type, enabled=False):
        if weights.norms_memory:
            old = F.layer_norm(old, old.shape[-1:], eps=eps)
        projected = F.linear(old, weights.memory.t(), weights.memory_bias).transpose(0, 1)
        apply: Any = _Recurrence.apply
        out, vectors = apply(
            x.transpose(0, 1),
            projected,
            hidden,
            seen,
            (span, activation, eps, compiled),
            weights.norms_memory,
            *weights.tensors().values(),
        )
    return out.transpose(0, 1), vectors.transpose(0, 1)


class TokenStep:
    """One token through all layers without gradients: the recurrence for reading on.

    For frozen weights and one number of rows. The weights' views and the space to work in are made
    once; what a step returns is the caller's to copy before the next.
    """

    def __init__(self, weights: Folded, batch: int, activation: str, eps: float) -> None:
        self.weights, self.batch, self.eps = weights, batch, eps
        self.gelu = activation == "gelu"
        self.n_layers, n_heads, d_model, self.width = weights.query.shape
        self.heads, self.size = (n_heads, batch, self.width), (d_model,)
        d_ff, inner = weights.inner.shape[2], n_heads * self.width
        new = weights.query.new_empty
        self.states = new(self.n_layers + 1, batch, d_model)
        self.state = self.states.unbind(0)
        self.flat_states = self.states.view(self.n_layers + 1, -1).t()
        self.middle = new(batch, d_model)
        # Their last columns are the ones that biases are multiplied with.
        self.attended, self.activated = new(batch, inner + 1), new(batch, d_ff + 1)
        self.attended[:, -1] = self.activated[:, -1] = 1
        self.pre = self.activated[:, :-1]
        self.head = self.attended[:, :-1].unflatten(1, (n_heads, self.width)).transpose(0, 1)
        self.drawn = new(n_heads * batch, 1, self.width)
        self.drawn_heads = self.drawn.view(self.heads)
        self.projected = new(batch, weights.memory.shape[1])
        groups = weights.n_groups
        self.by_slot = self.projected.view(batch, 2, groups, n_heads, self.width)
        self.layers = list(
            zip(
                weights.query.contiguous().unbind(0),
                weights.query_bias.unbind(0),
                weights.output.unbind(0),
                weights.inner.contiguous().unbind(0),
                weights.inner_bias.unbind(0),
                weights.outer.unbind(0),
                strict=True,
            )
        )
        self.memory = weights.memory.contiguous()

    def __call__(
        self, x: Tensor, kv: Tensor, hidden: Tensor | None, vector: Tensor, slot: Tensor
    ) -> Tensor:
        """Read one token per row.

        Args:
            x: ``[B, D]``.
            kv: keys and values ``[2, G, H * B, N, K]`` of the tokens before.
            hidden: bool ``[B, N]``, true where a row has no such token (None: nowhere).
            vector: where its memory vector goes, ``[B, D]``, contiguous.
            slot: where its keys and values go, ``[B, 2, G, H, K]``.

        Returns:
            The last layer's output ``[B, D]``, valid until the next call.
        """
        w, n_keys, size = self.weights, kv.shape[3], self.size
        rows = kv.shape[2]
        self.state[0].copy_(x)
        seen = None
        if n_keys:
            keys, values = kv[0].transpose(2, 3).unbind(0), kv[1].unbind(0)
            keys, values = (t * (self.n_layers // len(t)) for t in (keys, values))
            r_keys = w.position_keys[..., -n_keys:].unbind(0)
            r_scores = w.position_scores[..., -n_keys:].unbind(0)
        if hidden is not None:
            seen = (~hidden.all(-1)).to(x.dtype)
            self.attended[:, -1] = seen
        for n, (q_w, q_b, o_w, i_w, i_b, f_w) in enumerate(self.layers):
            middle = h = self.state[n]
            if n_keys:
                z = torch.native_layer_norm(h, size, None, None, self.eps)[0]
                q = torch.baddbmm(q_b, z.expand(self.heads[0], -1, -1), q_w)
                scores = torch.baddbmm(r_scores[n], q, r_keys[n])
                if hidden is not None:
                    scores.masked_fill_(hidden, torch.finfo(x.dtype).min / 4)
                scores = scores.view(rows, 1, n_keys)
                scores.baddbmm_(q.view(rows, 1, self.width), keys[n])
                torch.bmm(torch.softmax(scores, -1), values[n], out=self.drawn)
                self.head.copy_(self.drawn_heads)
                if seen is not None:
                    self.head.mul_(seen[:, None])
                middle = torch.addmm(h, self.attended, o_w, out=self.middle)
            z = torch.native_layer_norm(middle, size, None, None, self.eps)[0]
            torch.addmm(i_b, z, i_w, out=self.pre)
            if self.gelu:
                self.pre.copy_(F.gelu(self.pre))
            else:
                self.pre.relu_()
            torch.addmm(middle, self.activated, f_w, out=self.state[n + 1])
        if seen is not None:
            self.attended[:, -1] = 1
        torch.mv(self.flat_states, w.mix, out=vector.view(-1))
        if w.norms_memory:
            vector = torch.native_layer_norm(vector, size, None, None, self.eps)[0]
        torch.addmm(w.memory_bias, vector, self.memory, out=self.projected)
        slot.copy_(self.by_slot)
        return self.state[-1]


@dataclass
class _Kept:
    """What a forward keeps for its backward. Time comes first inside, and heads before rows."""

    states: Tensor
    """Embedding and layers' outputs, ``[L + 1, T, B, D]``."""
    middles: Tensor
    """Between the sub-layers, ``[L, T, B, D]``."""
    queries: Tensor
    """``[T, L, H * B, K]``."""
    attended: Tensor
    """What the heads drew, and a one: ``[L, T, B, H * K + 1]``."""
    activated: Tensor
    """Inside the feed-forward, and a one: ``[L, T, B, F + 1]``."""
    before: Tensor
    """The same before gelu; relu needs no other than ``activated``."""
    vectors: Tensor
    """``[T, B, D]``."""
    kv: Tensor
    """``[2, G, H * B, O + T, K]``; compiled, ``[2, G, H * B, K, O + T]``."""
    memory_moments: Tensor
    """Mean and ``rstd`` of memory vectors, where they are normalised, ``[T, 2, B]``."""
    mean: list[list[Any]] | None = None
    """Of each norm and step, ``[B, 1]``; likewise ``rstd``."""
    rstd: list[list[Any]] | None = None
    moments: Tensor | None = None
    """The same where compiled, ``[L, T, 4, B]``."""
    probabilities: Any = None
    """Attention weights, for each step ``[L, H * B, 1, n]``; compiled, all in one tensor."""


class CompiledReader:
    """Reading on without gradients by the loop in C, for frozen weights and one number of rows."""

    def __init__(self, weights: Folded, batch: int, span: int, activation: str, eps: float) -> None:
        self.weights, self.batch, self.eps = weights, batch, eps
        self.options = (span, activation, eps, True)
        self.kept: _Kept | None = None
        self.loop: CompiledLoop | None = None

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
        if self.kept is None or self.kept.states.shape[1] != n_steps:
            self._prepare(n_steps, kv)
        kept, loop = self.kept, self.loop
        assert kept is not None
        assert loop is not None
        integers = {"n_old": n_old, "kv_stride": kv.shape[-1]}
        if length is None:
            loop.give(integers, {"kv": kv})
        else:
            hidden, seen = _hidden(length, n_old, x.dtype)
            kept.attended[:, 0, :, -1] = seen
            loop.give(integers, {"kv": kv, "hidden": hidden, "seen": seen})
        kept.states[0] = x.transpose(0, 1)
        loop.forward(end - n_old)
        if length is not None:
            # The next call may be without.
            self.kept = None
        return kept.states[-1].transpose(0, 1), kept.vectors

    def _prepare(self, n_steps: int, kv: Tensor) -> None:
        w, span = self.weights, self.options[0]
        n_layers, n_heads, d_model, width = w.query.shape
        new, steps = w.mix.new_empty, (n_layers, n_steps, self.batch)
        activated = new(*steps, w.inner.shape[2] + 1)
        attended = new(*steps, n_heads * width + 1)
        attended[..., -1] = activated[..., -1] = 1
        self.kept = _Kept(
            states=new(n_layers + 1, *steps[1:], d_model),
            middles=new(*steps, d_model),
            queries=new(n_steps, n_layers, n_heads * self.batch, width),
            attended=attended,
            activated=activated,
            before=new(*steps, w.inner.shape[2]),
            vectors=new(*steps[1:], d_model),
            kv=kv,
            moments=new(n_layers, n_steps, 4, self.batch),
            memory_moments=new(n_steps, 2, self.batch),
            probabilities=new(n_layers * n_heads * self.batch * n_steps * span),
        )
        self.loop = CompiledLoop(self.eps, *_arguments(self.kept, w, None, None, 0, self.options))


def _hidden(length: Tensor, n_old: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What is added to the scores of old slots ``[B, O]``, and which rows have any, ``[B]``."""
    absent = torch.arange(n_old, device=length.device) < (n_old - length)[:, None]
    # Large enough that its exponential is zero, and finite: see `attend`.
    hidden = torch.zeros_like(absent, dtype=dtype)
    hidden.masked_fill_(absent, torch.finfo(dtype).min / 4)
    return hidden, (length > 0).to(dtype)


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
        hidden: Tensor | None,
        seen: Tensor | None,
        options: tuple[int, str, float, bool],
        norms_memory: bool,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        w = Folded.of(tensors, norms_memory)
        _, activation, _, compiled = options
        n_steps, batch, d_model = x.shape
        n_layers, n_heads, _, width = w.query.shape
        d_ff, rows, groups, n_old = w.inner.shape[2], n_heads * batch, w.n_groups, len(old)
        inner_width, new = n_heads * width, x.new_empty

        activated = new(n_layers, n_steps, batch, d_ff + 1)
        gelu = activation == "gelu"
        slots = (width, n_old + n_steps) if compiled else (n_old + n_steps, width)
        kept = _Kept(
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
        elif seen is not None:
            kept.attended[:, 0, :, -1] = seen
        place = kept.kv.transpose(3, 4) if compiled else kept.kv
        _by_slot(place[..., :n_old, :], batch).copy_(
            old.view(n_old, batch, 2, groups, n_heads, width)
        )
        if compiled:
            _compiled_forward(kept, w, hidden, seen, n_old, options)
        else:
            _forward(kept, w, hidden, seen, n_old, options)
        ctx.save_for_backward(*tensors)
        ctx.kept, ctx.norms_memory = kept, norms_memory
        ctx.rest = (hidden, seen, n_old, options)
        return kept.states[-1].clone(), kept.vectors.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_vectors: Tensor) -> tuple[Tensor | None, ...]:
        # Backward may be called under autocast, whatever forward was.
        with torch.autocast(d_out.device.type, enabled=False):
            w = Folded.of(ctx.saved_tensors, ctx.norms_memory)
            kept = ctx.kept
            hidden, seen, n_old, options = ctx.rest
            run = _compiled_backward if options[-1] else _backward
            g = run(kept, w, hidden, seen, n_old, options, d_out, d_vectors)
            return (
                g.first,
                _by_slot(g.kv[..., :n_old, :], d_out.shape[1]).flatten(2),
                *[None] * 4,
                *_weight_gradients(kept, w, g, options[2]).tensors().values(),
            )


def _forward(
    kept: _Kept,
    w: Folded,
    hidden: Tensor | None,
    seen: Tensor | None,
    n_old: int,
    options: tuple[int, str, float, bool],
) -> None:
    """Fill what is kept, step by step."""
    span, activation, eps, _ = options
    states, middles, queries = kept.states, kept.middles, kept.queries
    attended, activated, vectors, kv = kept.attended, kept.activated, kept.vectors, kept.kv
    n_layers, n_steps, batch, d_model = middles.shape
    n_heads, _, width = w.query.shape[1:]
    d_ff, rows, groups = w.inner.shape[2], n_heads * batch, w.n_groups
    inner_width, size, new = n_heads * width, (d_model,), states.new_empty

    # One view per step of everything: cheaper than to select step by step.
    state, middle = _views(states), _views(middles)
    heads = attended[..., :inner_width].unflatten(-1, (n_heads, width)).transpose(-3, -2)
    head, out, act = _views(heads), _views(attended), _views(activated)
    pre, post = _views(kept.before), _views(activated[..., :d_ff])
    query = [step.unbind(0) for step in queries.unbind(0)]
    query_heads = _views(queries.view(n_steps, n_layers, n_heads, batch, width))
    slots = _by_slot(kv[..., n_old:, :], batch).unbind(0)
    step_states = states.view(n_layers + 1, n_steps, -1).unbind(1)
    q_w, q_b, o_w = w.query.unbind(0), w.query_bias.unbind(0), w.output.unbind(0)
    i_w, i_b, f_w = w.inner.unbind(0), w.inner_bias.unbind(0), w.outer.unbind(0)
    scratch = new(batch, 2 * groups * inner_width)
    scratch_slot = scratch.view(batch, 2, groups, n_heads, width)
    drawn = new(rows, 1, width)
    drawn_heads = drawn.view(n_heads, batch, width)
    mean: list[list[Any]] = [[None] * n_steps for _ in range(2 * n_layers)]
    rstd: list[list[Any]] = [[None] * n_steps for _ in range(2 * n_layers)]
    probabilities: list[Any] = []

    # The first layer's queries do not depend on the recurrence.
    z, mean0, rstd0 = torch.native_layer_norm(states[0], size, None, None, eps)
    mean[0], rstd[0] = list(mean0.unbind(0)), list(rstd0.unbind(0))
    first = torch.baddbmm(q_b[0], z.view(1, -1, d_model).expand(n_heads, -1, -1), q_w[0])
    queries[:, 0].view(n_steps, n_heads, batch, width).copy_(
        first.view(n_heads, n_steps, batch, width).transpose(0, 1)
    )

    for t in range(n_steps):
        low, high = max(0, n_old + t - span), n_old + t
        n_keys = high - low
        if n_keys:
            keys = kv[0, :, :, low:high].transpose(2, 3).expand(n_layers, -1, -1, -1).unbind(0)
            values = kv[1, :, :, low:high].expand(n_layers, -1, -1, -1).unbind(0)
            r_keys = w.position_keys[..., span - n_keys :].unbind(0)
            r_scores = w.position_scores[..., span - n_keys :].unbind(0)
            weights = new(n_layers, rows, 1, n_keys)
            weight = weights.unbind(0)
            probabilities.append(weights)
        else:
            probabilities.append(None)
        for n in range(n_layers):
            h = state[n][t]
            if n_keys:
                q = query[t][n].unsqueeze(1)
                if n:
                    z, mean[2 * n][t], rstd[2 * n][t] = torch.native_layer_norm(
                        h, size, None, None, eps
                    )
                    torch.baddbmm(q_b[n], z.expand(n_heads, -1, -1), q_w[n], out=query_heads[t][n])
                scores = torch.baddbmm(r_scores[n], query_heads[t][n], r_keys[n])
                if hidden is not None and low < n_old:
                    scores[..., : n_old - low].add_(hidden[:, low:])
                scores = scores.view(rows, 1, n_keys).baddbmm_(q, keys[n])
                torch.softmax(scores, -1, out=weight[n])
                torch.bmm(weight[n], values[n], out=drawn)
                head[n][t].copy_(drawn_heads)
                if t == 0 and seen is not None:
                    head[n][t].mul_(seen[:, None])
                torch.addmm(h, out[n][t], o_w[n], out=middle[n][t])
            else:
                middle[n][t].copy_(h)
            z, mean[2 * n + 1][t], rstd[2 * n + 1][t] = torch.native_layer_norm(
                middle[n][t], size, None, None, eps
            )
            torch.addmm(i_b[n], z, i_w[n], out=pre[n][t])
            if activation == "gelu":
                post[n][t].copy_(F.gelu(pre[n][t]))
            else:
                pre[n][t].relu_()
            torch.addmm(middle[n][t], act[n][t], f_w[n], out=state[n + 1][t])
        torch.mv(step_states[t].t(), w.mix, out=vectors[t].view(-1))
        vector = vectors[t]
        if w.norms_memory:
            vector, m, r = torch.native_layer_norm(vector, size, None, None, eps)
            kept.memory_moments[t, 0], kept.memory_moments[t, 1] = m[:, 0], r[:, 0]
        torch.addmm(w.memory_bias, vector, w.memory, out=scratch)
        slots[t].copy_(scratch_slot)
    kept.mean, kept.rstd, kept.probabilities = mean, rstd, probabilities


@dataclass
class _Gradients:
    """What the loop backwards finds; ``d`` of what :class:`_Kept` has, in its layouts."""

    states: Tensor
    """Of the layers' outputs only, ``[L, T, B, D]``."""
    middles: Tensor
    inner: Tensor
    """Before the activation, ``[L, T, B, F]``."""
    query: Tensor
    """``[L, T, B, H * K]``."""
    first: Tensor
    """Of the input, ``[T, B, D]``."""
    mixed: Tensor
    """Of the memory vectors, ``[T, B, D]``."""
    projected: Tensor
    """Of their keys and values, ``[T, B, 2 * G * H * K]``."""
    kv: Tensor
    """``[2, G, H * B, O + T, K]``."""
    position_keys: Tensor
    """``[L, H, K, S]``."""
    position_scores: Tensor
    """``[L, H, 1, S]``."""


def _backward(
    kept: _Kept,
    w: Folded,
    hidden: Tensor | None,
    seen: Tensor | None,
    n_old: int,
    options: tuple[int, str, float, bool],
    d_out: Tensor,
    d_vectors: Tensor,
) -> _Gradients:
    """From the last step to the first."""
    span, activation, eps, _ = options
    states, middles, queries, kv = kept.states, kept.middles, kept.queries, kept.kv
    mean, rstd, probabilities = kept.mean, kept.rstd, kept.probabilities
    assert mean is not None
    assert rstd is not None
    n_layers, n_steps, batch, d_model = middles.shape
    n_heads, _, width = w.query.shape[1:]
    d_ff, rows, groups = w.inner.shape[2], n_heads * batch, w.n_groups
    inner_width, size = n_heads * width, (d_model,)
    mix = w.mix.tolist()

    new = states.new_empty
    d_states = new(n_layers, n_steps, batch, d_model)
    d_middles = new(n_layers, n_steps, batch, d_model)
    d_inner = new(n_layers, n_steps, batch, d_ff)
    d_query = new(n_layers, n_steps, batch, inner_width)
    if n_old == 0:
        d_query[:, 0] = 0
    d_mixed = new(n_steps, batch, d_model)
    d_projected = new(n_steps, batch, 2 * groups * inner_width)
    d_kv = torch.zeros_like(kv)
    d_position_keys = torch.zeros_like(w.position_keys).transpose(2, 3).contiguous()
    d_position_scores = torch.zeros_like(w.position_scores)

    d_state, d_middle, d_pre, d_q = map(_views, (d_states, d_middles, d_inner, d_query))
    d_first = new(n_steps, batch, d_model)
    d_q_heads = _views(d_query.unflatten(-1, (n_heads, width)).transpose(-3, -2))
    post = _views(kept.before)
    state, middle = _views(states), _views(middles)
    query = queries.unbind(0)
    d_slot = _by_slot(d_kv[..., n_old:, :], batch).unbind(0)
    d_slot_flat = d_projected.view(n_steps, batch, 2, groups, n_heads, width).unbind(0)
    # The transposes, laid out once.
    f_w = w.outer[:, :d_ff].transpose(1, 2).contiguous().unbind(0)
    i_w = w.inner.transpose(1, 2).contiguous().unbind(0)
    o_w = w.output[:, :inner_width].unflatten(1, (n_heads, width)).transpose(2, 3)
    o_w = o_w.contiguous().unbind(0)
    q_w = w.query.transpose(2, 3).reshape(n_layers, inner_width, d_model).unbind(0)
    m_w = w.memory.t().contiguous()
    r_keys_all = w.position_keys.transpose(2, 3).contiguous()
    d_drawn_all = new(n_layers, rows, 1, width)
    d_drawn = d_drawn_all.unbind(0)
    d_drawn_heads = d_drawn_all.view(n_layers, n_heads, batch, width).unbind(0)
    asked = new(rows, 1, width)
    asked_heads = asked.view(n_heads, batch, width)

    for t in range(n_steps - 1, -1, -1):
        low, high = max(0, n_old + t - span), n_old + t
        n_keys = high - low
        if n_keys:
            keys = kv[0, :, :, low:high].expand(n_layers, -1, -1, -1).unbind(0)
            values = kv[1, :, :, low:high].transpose(2, 3).expand(n_layers, -1, -1, -1).unbind(0)
            r_keys = r_keys_all[:, :, span - n_keys :].unbind(0)
            weight = probabilities[t].unbind(0)
            d_scores_all = new(n_layers, rows, 1, n_keys)
            d_scores = d_scores_all.unbind(0)
            d_scores_heads = d_scores_all.view(n_layers, n_heads, batch, n_keys).unbind(0)
        # What later tokens asked of this one's keys and values reaches its memory vector.
        d_slot_flat[t].copy_(d_slot[t])
        if w.norms_memory:
            g = torch.mm(d_projected[t], m_w)
            m, r = kept.memory_moments[t].unsqueeze(-1)
            g = _through_norm(g, kept.vectors[t], m, r)
            d_vector = torch.add(d_vectors[t], g, out=d_mixed[t])
        else:
            d_vector = torch.addmm(d_vectors[t], d_projected[t], m_w, out=d_mixed[t])
        torch.add(d_out[t], d_vector, alpha=mix[-1], out=d_state[-1][t])
        for n in range(n_layers - 1, -1, -1):
            g = torch.mm(d_state[n][t], f_w[n], out=d_pre[n][t])
            _through_activation(g, post[n][t], activation)
            g = _through_norm(
                torch.mm(g, i_w[n]), middle[n][t], mean[2 * n + 1][t], rstd[2 * n + 1][t]
            )
            g = torch.add(d_state[n][t], g, out=d_middle[n][t])
            if n_keys:
                torch.bmm(g.expand(n_heads, -1, -1), o_w[n], out=d_drawn_heads[n])
                if t == 0 and seen is not None:
                    d_drawn_heads[n].mul_(seen[:, None])
                d_weight = torch.bmm(d_drawn[n], values[n])
                torch._softmax_backward_data(
                    d_weight, weight[n], -1, g.dtype, grad_input=d_scores[n]
                )
                torch.bmm(d_scores[n], keys[n], out=asked)
                asked_heads.baddbmm_(d_scores_heads[n], r_keys[n])
                d_q_heads[n][t].copy_(asked_heads)
                if n:
                    g = g + _through_norm(
                        torch.mm(d_q[n][t], q_w[n]), state[n][t], mean[2 * n][t], rstd[2 * n][t]
                    )
            below = d_state[n - 1][t] if n else d_first[t]
            torch.add(g, d_vector, alpha=mix[n], out=below)
        if n_keys:
            # All layers at once; with shared projections their sum is the product's inner sum.
            d_a = d_scores_all.view(n_layers, n_heads * batch, n_keys)
            d_s = _summed(d_a, query[t], groups)
            d_kv[0, :, :, low:high] += d_s
            d_kv[1, :, :, low:high] += _summed(
                probabilities[t].squeeze(2), d_drawn_all.squeeze(2), groups
            )
            by_head = d_scores_all.view(n_layers * n_heads, batch, n_keys)
            d_position_keys[:, :, span - n_keys :] += torch.bmm(
                by_head.transpose(1, 2), query[t].view(n_layers * n_heads, batch, width)
            ).view(n_layers, n_heads, n_keys, width)
            d_position_scores[..., span - n_keys :] += by_head.sum(1).view(
                n_layers, n_heads, 1, n_keys
            )

    # The first layer's norm and query, for all steps at once.
    _, mean0, rstd0 = torch.native_layer_norm(states[0], size, None, None, eps)
    d_first += _through_norm(torch.matmul(d_query[0], q_w[0]), states[0], mean0, rstd0)
    return _Gradients(
        d_states,
        d_middles,
        d_inner,
        d_query,
        d_first,
        d_mixed,
        d_projected,
        d_kv,
        d_position_keys.transpose(2, 3),
        d_position_scores,
    )


def _weight_gradients(kept: _Kept, w: Folded, g: _Gradients, eps: float) -> Folded:
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


# ----- The loops in C


def _compiled_forward(
    kept: _Kept,
    w: Folded,
    hidden: Tensor | None,
    seen: Tensor | None,
    n_old: int,
    options: tuple[int, str, float, bool],
) -> None:
    """As :func:`_forward`."""
    n_layers, n_steps, batch, _ = kept.middles.shape
    seen_slots = sum(min(options[0], n_old + t) for t in range(n_steps))
    kept.probabilities = kept.states.new_empty(kept.queries[0].shape[:2].numel() * seen_slots)
    kept.moments = kept.states.new_empty(n_layers, n_steps, 4, batch)
    integers, tensors = _arguments(kept, w, hidden, seen, n_old, options)
    CompiledLoop(options[2], integers, tensors).forward()


def _compiled_backward(
    kept: _Kept,
    w: Folded,
    hidden: Tensor | None,
    seen: Tensor | None,
    n_old: int,
    options: tuple[int, str, float, bool],
    d_out: Tensor,
    d_vectors: Tensor,
) -> _Gradients:
    """As :func:`_backward`."""
    n_layers, n_steps, batch, _ = kept.middles.shape
    n_heads, _, width = w.query.shape[1:]
    empty = torch.empty_like
    d_kv = torch.zeros_like(kept.kv)
    g = _Gradients(
        states=empty(kept.middles),
        middles=empty(kept.middles),
        inner=kept.middles.new_empty(n_layers, n_steps, batch, w.inner.shape[2]),
        query=kept.middles.new_empty(n_layers, n_steps, batch, n_heads * width),
        first=empty(kept.vectors),
        mixed=empty(kept.vectors),
        projected=kept.vectors.new_empty(n_steps, batch, w.memory.shape[1]),
        kv=d_kv.transpose(3, 4),
        position_keys=torch.zeros_like(w.position_keys, memory_format=torch.contiguous_format),
        position_scores=torch.zeros_like(w.position_scores, memory_format=torch.contiguous_format),
    )
    integers, tensors = _arguments(kept, w, hidden, seen, n_old, options)
    tensors |= {f"d_{f.name}": getattr(g, f.name) for f in fields(g)}
    tensors |= {"d_kv": d_kv, "d_out": d_out.contiguous(), "d_vectors": d_vectors.contiguous()}
    CompiledLoop(options[2], integers, tensors).backward()
    return g


def _arguments(
    kept: _Kept,
    w: Folded,
    hidden: Tensor | None,
    seen: Tensor | None,
    n_old: int,
    options: tuple[int, str, float, bool],
) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Sizes and tensors under the names that they have in C."""
    n_layers, n_steps, batch, d_model = kept.middles.shape
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
        "n_old": n_old,
        "span": options[0],
        "gelu": int(options[1] == "gelu"),
        "kv_stride": n_old + n_steps,
        "norms_memory": int(w.norms_memory),
    }
    tensors = {name: tensor.contiguous() for name, tensor in w.tensors().items()}
    tensors["query"] = w.query.transpose(1, 2).contiguous()
    names = ("states", "middles", "queries", "attended", "activated", "vectors", "kv")
    tensors |= {
        name: getattr(kept, name) for name in (*names, "moments", "memory_moments", "probabilities")
    }
    if options[1] == "gelu":
        tensors["before"] = kept.before
    if hidden is not None and seen is not None:
        tensors |= {"hidden": hidden, "seen": seen}
    return integers, tensors


def _views(x: Tensor) -> list[tuple[Tensor, ...]]:
    """``[L, T, ...]`` as ``L`` lists of ``T`` views."""
    return [layer.unbind(0) for layer in x.unbind(0)]


def _by_slot(kv: Tensor, batch: int) -> Tensor:
    """``[2, G, H * B, N, K]`` seen as ``[N, B, 2, G, H, K]``."""
    return kv.unflatten(2, (-1, batch)).permute(4, 3, 0, 1, 2, 5)


def _summed(a: Tensor, b: Tensor, groups: int) -> Tensor:
    """``a_l^T b_l`` per row, summed over a group's layers: ``[L, R, N], [L, R, K] -> [G, R, N, K]``."""
    if groups == len(a):
        return a.unsqueeze(-1) * b.unsqueeze(2)
    return torch.bmm(a.permute(1, 2, 0), b.permute(1, 0, 2)).unsqueeze(0)


def _through_norm(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """Gradient of a norm without gain and bias."""
    size = x.shape[-1:]
    backward = torch.ops.aten.native_layer_norm_backward.default
    return backward(g, x, size, mean, rstd, None, None, (True, False, False))[0]


def _through_activation(g: Tensor, x: Tensor, activation: str) -> None:
    """In place; ``x`` is what went into gelu, and what came out of relu."""
    if activation == "gelu":
        g.copy_(torch.ops.aten.gelu_backward.default(g, x))
    else:
        torch.ops.aten.threshold_backward.grad_input(g, x, 0, grad_input=g)
