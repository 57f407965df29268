"""The Feedback Transformer's recurrence step by step, in PyTorch: forward and backward.
``docs/annotated/feedback_backward.md`` derives them; names and order agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memspan.ops.feedback.buffers import Call, FoldedWeights, Forward, Gradients, Saved, by_slot
from memspan.ops.feedback.dropout import NO_DROPOUT, drop


class _Past(NamedTuple):
    """What one step attends to; ``n`` slots, ``low`` the first. A list has an entry per layer."""

    n_keys: int
    low: int
    keys: Sequence[Tensor]
    """Forward ``[H * B, K, n]``, backward ``[H * B, n, K]``."""
    values: Sequence[Tensor]
    """Forward ``[H * B, n, K]``, backward ``[H * B, K, n]``."""
    position_keys: Sequence[Tensor]
    """``[H, K, n]``; backward ``[H, n, K]``."""
    weights: Sequence[Tensor]
    """Attention weights ``[H * B, 1, n]``."""
    factors: Sequence[Tensor | None]
    """What dropout multiplies them with."""


_PerStep = Sequence[Sequence[Tensor | None]]
"""One for each layer and step; None: nothing is dropped."""


class _Dropout:
    """The factors of one segment, step by step."""

    def __init__(self, call: Call, saved: Saved) -> None:
        n_layers, n_steps = saved.middles.shape[:2]
        self.nothing: list[None] = [None] * n_layers
        factors = NO_DROPOUT if call.kept is None else call.kept.factors(saved.states.dtype)

        def per_step(x: Tensor | None) -> _PerStep:
            return [[None] * n_steps] * n_layers if x is None else _views(x)

        self.weights = factors.weights
        self.attention, self.activated = per_step(factors.attention), per_step(factors.activated)
        self.feed_forward = per_step(factors.feed_forward)

    def all_weights(self, t: int, n_keys: int) -> Tensor | None:
        """A step's factors of attention weights in all layers, ``[L, H * B, 1, n]``."""
        if self.weights is None:
            return None
        return self.weights[t, :, :, self.weights.shape[3] - n_keys :].unsqueeze(2)

    def of_weights(self, t: int, n_keys: int) -> Sequence[Tensor | None]:
        """The same layer by layer."""
        every = self.all_weights(t, n_keys)
        return self.nothing if every is None else every.unbind(0)


def new_slots(like: Tensor, *sizes: int) -> Tensor:
    """Keys and values of ``N`` slots: ``[2, G, H * B, N, K]``."""
    return like.new_empty(2, *sizes)


def prepare(saved: Saved, w: FoldedWeights, call: Call) -> Forward:
    """The loop forward, to be called with ``call`` or with smaller ones."""
    return _Forward(saved, w, call)


class _Forward:
    """The loop forward and the parts of one step, ``n`` a layer and ``t`` a step.

    Every buffer is cut into views of all its steps at once, which is cheaper than to select step by
    step.
    """

    def __init__(self, saved: Saved, w: FoldedWeights, call: Call) -> None:
        self.saved, self.w = saved, w
        self.n_layers, n_steps, self.batch, d_model = saved.middles.shape
        self.n_heads, _, self.width = w.query.shape[1:]
        self.size, self.gelu = (d_model,), call.activation == "gelu"
        heads, inner_width = (self.n_heads, self.width), self.n_heads * self.width
        new = saved.states.new_empty

        self.state, self.middle = _views(saved.states), _views(saved.middles)
        # Where the residual sums go: post-norm normalises them.
        self.post_norm, self.sum = w.post_norm, [self.middle, self.state[1:]]
        if self.post_norm:
            self.sum = [_views(sums) for sums in saved.sums]
        self.dropout = _Dropout(call, saved)
        self.states_of_step = saved.states.view(self.n_layers + 1, n_steps, -1).unbind(1)
        head = saved.attended[..., :inner_width].unflatten(-1, heads).transpose(-3, -2)
        self.head, self.attended = _views(head), _views(saved.attended)
        self.pre, self.activated = _views(saved.before), _views(saved.activated)
        self.post = _views(saved.activated[..., : w.inner.shape[2]])
        self.query = [step.unbind(0) for step in saved.queries.unsqueeze(3).unbind(0)]
        by_head = saved.queries.view(n_steps, self.n_layers, self.n_heads, self.batch, self.width)
        self.query_heads = _views(by_head)
        self.vector, self.moments = (
            saved.vectors.unbind(0),
            saved.memory_moments[..., None].unbind(0),
        )
        self.q_w, self.q_b, self.o_w = w.query.unbind(0), w.query_bias.unbind(0), w.output.unbind(0)
        self.i_w, self.i_b, self.f_w = w.inner.unbind(0), w.inner_bias.unbind(0), w.outer.unbind(0)

        self.projected = new(self.batch, w.memory.shape[1])
        self.projected_slot = self.projected.view(self.batch, 2, w.n_groups, *heads)
        self.read = new(self.n_heads * self.batch, 1, self.width)
        self.read_heads = self.read.view(self.n_heads, self.batch, self.width)
        self.mean, self.rstd = (
            [[new(0)] * n_steps for _ in range(2 * self.n_layers)] for _ in range(2)
        )

    def __call__(self, call: Call, kv: Tensor, start: int = 0) -> None:
        """Compute all steps; the slots that the first of them sees begin at ``start`` in ``kv``."""
        n_steps, end = len(self.vector), start + call.n_old
        self.call, self.kv = call, kv[..., start : end + n_steps, :]
        self.slot = by_slot(kv[..., end : end + n_steps, :], self.batch).unbind(0)
        self.probabilities: list[Tensor | None] = []
        # Reading on may be under autocast.
        with torch.autocast(kv.device.type, enabled=False):
            self.first_queries()
            for t in range(n_steps):
                past = self.past(t)
                for n in range(self.n_layers):
                    self.attention(n, t, past)
                    self.feed_forward(n, t)
                self.memory_vector(t)
        saved = self.saved
        saved.mean, saved.rstd, saved.probabilities = self.mean, self.rstd, self.probabilities

    def first_queries(self) -> None:
        """The first layer's queries, for all steps at once: they do not depend on the recurrence."""
        n_steps, states = len(self.saved.queries), self.saved.states
        z = states[0]
        if not self.post_norm:
            z, mean, rstd = torch.native_layer_norm(z, self.size, None, None, self.call.eps)
            self.mean[0], self.rstd[0] = list(mean.unbind(0)), list(rstd.unbind(0))
        z = z.view(1, -1, *self.size).expand(self.n_heads, -1, -1)
        first = torch.baddbmm(self.q_b[0], z, self.q_w[0])
        self.saved.queries[:, 0].view(n_steps, self.n_heads, self.batch, self.width).copy_(
            first.view(self.n_heads, n_steps, self.batch, self.width).transpose(0, 1)
        )

    def past(self, t: int) -> _Past | None:
        """What the token attends to, with room for the weights; None: nothing."""
        low, high = max(0, self.call.n_old + t - self.call.span), self.call.n_old + t
        n_keys, every = high - low, (self.n_layers, -1, -1, -1)
        if not n_keys:
            self.probabilities.append(None)
            return None
        kept_keys, kept_values = self.kv.narrow(3, low, n_keys).unbind(0)
        first = self.call.span - n_keys
        weights = self.read.new_empty(self.n_layers, len(self.read), 1, n_keys)
        self.probabilities.append(weights)
        self.position_scores = self.w.position_scores.narrow(3, first, n_keys).unbind(0)
        return _Past(
            n_keys,
            low,
            keys=kept_keys.transpose(2, 3).expand(every).unbind(0),
            values=kept_values.expand(every).unbind(0),
            position_keys=self.w.position_keys.narrow(3, first, n_keys).unbind(0),
            weights=weights.unbind(0),
            factors=self.dropout.of_weights(t, n_keys),
        )

    def attention(self, n: int, t: int, past: _Past | None) -> None:
        """``middle = h + W_o softmax(q . k + q . R + S) v``; ``h`` itself where there is no past."""
        h, call = self.state[n][t], self.call
        if past is None:
            self.sum[0][n][t].copy_(h)
            self._norm_after(0, n, t, self.middle[n][t])
            return
        query, n_keys, weights = self.query_heads[t][n], past.n_keys, past.weights[n]
        if n:
            z = self._norm_before(0, n, t, h)
            torch.baddbmm(self.q_b[n], z.expand(self.n_heads, -1, -1), self.q_w[n], out=query)
        scores = torch.baddbmm(self.position_scores[n], query, past.position_keys[n])
        if call.additive_mask is not None and past.low < call.n_old:
            scores[..., : call.n_old - past.low].add_(call.additive_mask[:, past.low :])
        scores = scores.view(-1, 1, n_keys).baddbmm_(self.query[t][n], past.keys[n])
        torch.softmax(scores, -1, out=weights)
        torch.bmm(drop(weights, past.factors[n]), past.values[n], out=self.read)
        head = self.head[n][t]
        head.copy_(self.read_heads)
        if t == 0 and call.has_memory is not None:
            head.mul_(call.has_memory[:, None])
        factor = self.dropout.attention[n][t]
        _add_product(h, self.attended[n][t], self.o_w[n], factor, self.sum[0][n][t])
        self._norm_after(0, n, t, self.middle[n][t])

    def feed_forward(self, n: int, t: int) -> None:
        """The state above: ``middle + W_2 f(W_1 z + b_1) + b_2``."""
        middle, pre, dropout = self.middle[n][t], self.pre[n][t], self.dropout
        torch.addmm(self.i_b[n], self._norm_before(1, n, t, middle), self.i_w[n], out=pre)
        if self.gelu:
            self.post[n][t].copy_(F.gelu(pre))
        else:
            pre.relu_()
        activated_factor = dropout.activated[n][t]
        if activated_factor is not None:
            self.post[n][t].mul_(activated_factor)
        factor = dropout.feed_forward[n][t]
        _add_product(middle, self.activated[n][t], self.f_w[n], factor, self.sum[1][n][t])
        self._norm_after(1, n, t, self.state[n + 1][t])

    def _norm_before(self, part: int, n: int, t: int, x: Tensor) -> Tensor:
        """What attention (``part`` 0) or the feed-forward (1) is given: with post-norm ``x`` itself."""
        if self.post_norm:
            return x
        z, self.mean[2 * n + part][t], self.rstd[2 * n + part][t] = torch.native_layer_norm(
            x, self.size, None, None, self.call.eps
        )
        return z

    def _norm_after(self, part: int, n: int, t: int, out: Tensor) -> None:
        """Post-norm of what a sub-layer added to; with pre-norm that is ``out`` already."""
        if self.post_norm:
            gain, bias, i = self.w.gains[part, n], self.w.biases[part, n], 2 * n + part
            z, self.mean[i][t], self.rstd[i][t] = torch.native_layer_norm(
                self.sum[part][n][t], self.size, gain, bias, self.call.eps
            )
            out.copy_(z)

    def memory_vector(self, t: int) -> None:
        """``m(t)``, the mix of the token's states, and its keys and values."""
        w, vector = self.w, self.vector[t]
        torch.mv(self.states_of_step[t].t(), w.mix, out=vector.view(-1))
        if w.norms_memory:
            vector, *moments = torch.native_layer_norm(vector, self.size, None, None, self.call.eps)
            torch.stack(moments, out=self.moments[t])
        torch.addmm(w.memory_bias, vector, w.memory, out=self.projected)
        self.slot[t].copy_(self.projected_slot)


def backward(
    saved: Saved, w: FoldedWeights, call: Call, d_out: Tensor, d_vectors: Tensor
) -> Gradients:
    """Gradients by all steps, from last to first.

    Args:
        saved: what the loop forward computed.
        w: as in forward, and ``call``.
        d_out: gradient of the last layer's output, ``[T, B, D]``.
        d_vectors: of the memory vectors, ``[T, B, D]``.
    """
    n_layers, n_steps = saved.middles.shape[:2]
    loop, mix = _Backward(saved, w, call), w.mix.unbind(0)
    for t in range(n_steps - 1, -1, -1):
        past = loop.past(t)
        d_vector = loop.memory_vector(t, d_vectors[t])
        torch.addcmul(d_out[t], d_vector, mix[-1], out=loop.d_state[-1][t])
        for n in range(n_layers - 1, -1, -1):
            loop.feed_forward(n, t)
            g = loop.attention(n, t, past)
            below = loop.d_state[n - 1][t] if n else loop.g.first[t]
            torch.addcmul(g, d_vector, mix[n], out=below)
        if past is not None:
            loop.keys_and_values(t, past)
    loop.first_queries()
    return loop.g


class _Backward:
    """The parts of one step backward, named as those of :class:`_Forward`."""

    def __init__(self, saved: Saved, w: FoldedWeights, call: Call) -> None:
        self.saved, self.w, self.call = saved, w, call
        self.n_layers, n_steps, self.batch, d_model = saved.middles.shape
        self.n_heads, _, self.width = w.query.shape[1:]
        heads, inner_width = (self.n_heads, self.width), self.n_heads * self.width
        self.rows, d_ff = self.n_heads * self.batch, w.inner.shape[2]
        assert saved.mean is not None
        assert saved.rstd is not None
        self.mean, self.rstd = saved.mean, saved.rstd

        new, steps = saved.states.new_empty, (n_steps, self.batch)
        self.g = g = Gradients.empty(saved, w, call)
        if call.n_old == 0:
            g.query[:, 0] = 0
        self.post_norm, self.dropout = w.post_norm, _Dropout(call, saved)

        self.state, self.middle = _views(saved.states), _views(saved.middles)
        self.post, self.query = _views(saved.before), saved.queries.unbind(0)
        self.sum = [_views(sums) for sums in saved.sums]
        self.d_state, self.d_middle = _views(g.states), _views(g.middles)
        self.d_added = [_views(g.attention), _views(g.feed_forward)]
        self.d_pre, self.d_q = _views(g.inner), _views(g.query)
        self.d_q_heads = _views(g.query.unflatten(-1, heads).transpose(-3, -2))
        self.d_slot = by_slot(g.kv[..., call.n_old :, :], self.batch).unbind(0)
        self.d_slot_flat = g.projected.view(*steps, 2, w.n_groups, *heads).unbind(0)
        # The transposes, laid out once.
        self.f_w = w.outer[:, :d_ff].transpose(1, 2).contiguous().unbind(0)
        self.i_w = w.inner.transpose(1, 2).contiguous().unbind(0)
        o_w = w.output[:, :inner_width].unflatten(1, heads).transpose(2, 3)
        self.o_w = o_w.contiguous().unbind(0)
        self.q_w = w.query.transpose(2, 3).reshape(self.n_layers, inner_width, d_model).unbind(0)
        self.m_w = w.memory.t().contiguous()
        self.position_keys = w.position_keys.transpose(2, 3).contiguous()
        # Of one step: gradients of what the heads read, of queries and of scores.
        self.d_read_all = new(self.n_layers, self.rows, 1, self.width)
        self.d_read = self.d_read_all.unbind(0)
        self.d_read_heads = self.d_read_all.view(-1, self.n_heads, self.batch, self.width).unbind(0)
        self.d_q_step = new(self.rows, 1, self.width)
        self.d_q_step_heads = self.d_q_step.view(self.n_heads, self.batch, self.width)

    def past(self, t: int) -> _Past | None:
        """What the token attended to, with room for the gradients of its scores; None: nothing."""
        low, high = max(0, self.call.n_old + t - self.call.span), self.call.n_old + t
        n_keys, every = high - low, (self.n_layers, -1, -1, -1)
        if not n_keys:
            return None
        kept_keys, kept_values = self.saved.kv.narrow(3, low, n_keys).unbind(0)
        self.d_scores_all = self.d_q_step.new_empty(self.n_layers, self.rows, 1, n_keys)
        self.d_scores = self.d_scores_all.unbind(0)
        self.d_scores_heads = self.d_scores_all.view(
            self.n_layers, self.n_heads, self.batch, n_keys
        ).unbind(0)
        return _Past(
            n_keys,
            low,
            keys=kept_keys.expand(every).unbind(0),
            values=kept_values.transpose(2, 3).expand(every).unbind(0),
            position_keys=self.position_keys.narrow(2, self.call.span - n_keys, n_keys).unbind(0),
            weights=self.saved.probabilities[t].unbind(0),
            factors=self.dropout.of_weights(t, n_keys),
        )

    def memory_vector(self, t: int, d_vector: Tensor) -> Tensor:
        """``dm(t)``: through keys and values from the tokens after, and from outside."""
        self.d_slot_flat[t].copy_(self.d_slot[t])
        d_projected, out = self.g.projected[t], self.g.mixed[t]
        if not self.w.norms_memory:
            return torch.addmm(d_vector, d_projected, self.m_w, out=out)
        m, r = self.saved.memory_moments[t].unsqueeze(-1).unbind(0)
        g = _through_norm(torch.mm(d_projected, self.m_w), self.saved.vectors[t], m, r)
        return torch.add(d_vector, g, out=out)

    def feed_forward(self, n: int, t: int) -> None:
        """``g + norm'(W_1^T da)`` with ``da = f'(...) W_2^T g``: the gradient of the middle."""
        above, added = self._through_sum(1, n, t, self.d_state[n][t], self.dropout.feed_forward)
        g, factor = self.d_pre[n][t], self.dropout.activated[n][t]
        torch.mm(added, self.f_w[n], out=g)
        if factor is not None:
            g.mul_(factor)
        _through_activation(g, self.post[n][t], self.call.activation)
        g = torch.mm(g, self.i_w[n])
        if not self.post_norm:
            mean, rstd = self.mean[2 * n + 1][t], self.rstd[2 * n + 1][t]
            g = _through_norm(g, self.middle[n][t], mean, rstd)
        torch.add(above, g, out=self.d_middle[n][t])

    def attention(self, n: int, t: int, past: _Past | None) -> Tensor:
        """``g + norm'(W_q^T dq)``, but for the first layer; scores' gradients stay for the end."""
        d_middle, factors = self.d_middle[n][t], self.dropout.attention
        above, added = self._through_sum(0, n, t, d_middle, factors)
        if past is None:
            # Nothing was added, whatever this is.
            return above
        read = self.d_read_heads[n]
        torch.bmm(added.expand(self.n_heads, -1, -1), self.o_w[n], out=read)
        if t == 0 and self.call.has_memory is not None:
            read.mul_(self.call.has_memory[:, None])
        d_weight, d_scores = torch.bmm(self.d_read[n], past.values[n]), self.d_scores[n]
        d_weight = drop(d_weight, past.factors[n])
        torch._softmax_backward_data(
            d_weight, past.weights[n], -1, above.dtype, grad_input=d_scores
        )
        torch.bmm(d_scores, past.keys[n], out=self.d_q_step)
        self.d_q_step_heads.baddbmm_(self.d_scores_heads[n], past.position_keys[n])
        self.d_q_heads[n][t].copy_(self.d_q_step_heads)
        if not n:
            return above
        d_z = torch.mm(self.d_q[n][t], self.q_w[n])
        if not self.post_norm:
            d_z = _through_norm(d_z, self.state[n][t], self.mean[2 * n][t], self.rstd[2 * n][t])
        return above + d_z

    def _through_sum(
        self, part: int, n: int, t: int, g: Tensor, factors: _PerStep
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the residual sum that sub-layer ``part`` adds to, and of what it adds."""
        if self.post_norm:
            mean, rstd = self.mean[2 * n + part][t], self.rstd[2 * n + part][t]
            g = _through_norm(g, self.sum[part][n][t], mean, rstd, self.w.gains[part, n])
        added, factor = self.d_added[part][n][t], factors[n][t]
        if factor is not None:
            torch.mul(g, factor, out=added)
        elif self.g.attention is not self.g.middles:
            added.copy_(g)
        return g, added

    def keys_and_values(self, t: int, past: _Past) -> None:
        """``dk``, ``dv``, ``dR`` and ``dS`` of all that the token attended to.

        All layers at once; with shared projections their sum is the product's inner sum.
        """
        n_layers, n_heads, n_keys = self.n_layers, self.n_heads, past.n_keys
        first = self.call.span - n_keys
        query, groups = self.query[t], self.w.n_groups
        weights = drop(self.saved.probabilities[t], self.dropout.all_weights(t, n_keys))
        d_scores, d_read = self.d_scores_all.squeeze(2), self.d_read_all.squeeze(2)
        d_keys, d_values = self.g.kv.narrow(3, past.low, n_keys).unbind(0)
        d_keys.add_(_summed(d_scores, query, groups))
        d_values.add_(_summed(weights.squeeze(2), d_read, groups))
        by_head = d_scores.view(n_layers * n_heads, self.batch, n_keys)
        by_row = query.view(n_layers * n_heads, self.batch, self.width)
        self.g.position_keys.narrow(3, first, n_keys).add_(
            torch.bmm(by_row.mT, by_head).view(n_layers, n_heads, self.width, n_keys)
        )
        self.g.position_scores.narrow(3, first, n_keys).add_(
            by_head.sum(1).view(n_layers, n_heads, 1, n_keys)
        )

    def first_queries(self) -> None:
        """The first layer's norm and query, for all steps at once."""
        x, g = self.saved.states[0], torch.matmul(self.g.query[0], self.q_w[0])
        if not self.post_norm:
            _, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], None, None, self.call.eps)
            g = _through_norm(g, x, mean, rstd)
        self.g.first += g


def _views(x: Tensor) -> list[tuple[Tensor, ...]]:
    """``[L, T, ...]`` as ``L`` lists of ``T`` views."""
    return [layer.unbind(0) for layer in x.unbind(0)]


def _summed(a: Tensor, b: Tensor, groups: int) -> Tensor:
    """``a_l^T b_l`` per row, summed over a group's layers: ``[L, R, N], [L, R, K] -> [G, R, N, K]``."""
    if groups == len(a):
        return a.unsqueeze(-1) * b.unsqueeze(2)
    return torch.bmm(a.permute(1, 2, 0), b.permute(1, 0, 2)).unsqueeze(0)


def _add_product(
    residual: Tensor, a: Tensor, weight: Tensor, factor: Tensor | None, out: Tensor
) -> None:
    """``residual + factor * (a weight)``."""
    if factor is None:
        torch.addmm(residual, a, weight, out=out)
    else:
        torch.addcmul(residual, torch.mm(a, weight), factor, out=out)


def _through_norm(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, gain: Tensor | None = None
) -> Tensor:
    """Gradient of what a norm was given."""
    size = x.shape[-1:]
    backward = torch.ops.aten.native_layer_norm_backward.default
    return backward(g, x, size, mean, rstd, gain, None, (True, False, False))[0]


def _through_activation(g: Tensor, x: Tensor, activation: str) -> None:
    """In place; ``x`` is what went into gelu, and what came out of relu."""
    if activation == "gelu":
        g.copy_(torch.ops.aten.gelu_backward.default(g, x))
    else:
        torch.ops.aten.threshold_backward.grad_input(g, x, 0, grad_input=g)
