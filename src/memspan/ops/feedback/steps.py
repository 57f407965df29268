"""The Feedback Transformer's recurrence step by step, in PyTorch: forward, backward, single tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memspan.ops.feedback.buffers import Call, Folded, Gradients, Saved, by_slot


def forward(saved: Saved, w: Folded, call: Call) -> None:
    """Compute all steps into ``saved``."""
    span, activation, eps, n_old = call.span, call.activation, call.eps, call.n_old
    additive_mask, has_memory = call.additive_mask, call.has_memory
    states, middles, queries = saved.states, saved.middles, saved.queries
    attended, activated, vectors, kv = saved.attended, saved.activated, saved.vectors, saved.kv
    n_layers, n_steps, batch, d_model = middles.shape
    n_heads, _, width = w.query.shape[1:]
    d_ff, rows, groups = w.inner.shape[2], n_heads * batch, w.n_groups
    inner_width, size, new = n_heads * width, (d_model,), states.new_empty

    # One view per step of everything: cheaper than to select step by step.
    state, middle = _views(states), _views(middles)
    heads = attended[..., :inner_width].unflatten(-1, (n_heads, width)).transpose(-3, -2)
    head, out, act = _views(heads), _views(attended), _views(activated)
    pre, post = _views(saved.before), _views(activated[..., :d_ff])
    query = [step.unbind(0) for step in queries.unbind(0)]
    query_heads = _views(queries.view(n_steps, n_layers, n_heads, batch, width))
    slots = by_slot(kv[..., n_old:, :], batch).unbind(0)
    step_states = states.view(n_layers + 1, n_steps, -1).unbind(1)
    q_w, q_b, o_w = w.query.unbind(0), w.query_bias.unbind(0), w.output.unbind(0)
    i_w, i_b, f_w = w.inner.unbind(0), w.inner_bias.unbind(0), w.outer.unbind(0)
    scratch = new(batch, 2 * groups * inner_width)
    scratch_slot = scratch.view(batch, 2, groups, n_heads, width)
    read = new(rows, 1, width)
    read_heads = read.view(n_heads, batch, width)
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
                if additive_mask is not None and low < n_old:
                    scores[..., : n_old - low].add_(additive_mask[:, low:])
                scores = scores.view(rows, 1, n_keys).baddbmm_(q, keys[n])
                torch.softmax(scores, -1, out=weight[n])
                torch.bmm(weight[n], values[n], out=read)
                head[n][t].copy_(read_heads)
                if t == 0 and has_memory is not None:
                    head[n][t].mul_(has_memory[:, None])
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
            saved.memory_moments[t, 0], saved.memory_moments[t, 1] = m[:, 0], r[:, 0]
        torch.addmm(w.memory_bias, vector, w.memory, out=scratch)
        slots[t].copy_(scratch_slot)
    saved.mean, saved.rstd, saved.probabilities = mean, rstd, probabilities


def backward(saved: Saved, w: Folded, call: Call, d_out: Tensor, d_vectors: Tensor) -> Gradients:
    """From the last step to the first; gradients of shapes as in :class:`Gradients`."""
    span, activation, eps, n_old = call.span, call.activation, call.eps, call.n_old
    has_memory = call.has_memory
    states, middles, queries, kv = saved.states, saved.middles, saved.queries, saved.kv
    mean, rstd, probabilities = saved.mean, saved.rstd, saved.probabilities
    assert mean is not None
    assert rstd is not None
    n_layers, n_steps, batch, d_model = middles.shape
    n_heads, _, width = w.query.shape[1:]
    d_ff, rows, groups = w.inner.shape[2], n_heads * batch, w.n_groups
    inner_width, size = n_heads * width, (d_model,)
    mix = w.mix.unbind(0)

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
    post = _views(saved.before)
    state, middle = _views(states), _views(middles)
    query = queries.unbind(0)
    d_slot = by_slot(d_kv[..., n_old:, :], batch).unbind(0)
    d_slot_flat = d_projected.view(n_steps, batch, 2, groups, n_heads, width).unbind(0)
    # The transposes, laid out once.
    f_w = w.outer[:, :d_ff].transpose(1, 2).contiguous().unbind(0)
    i_w = w.inner.transpose(1, 2).contiguous().unbind(0)
    o_w = w.output[:, :inner_width].unflatten(1, (n_heads, width)).transpose(2, 3)
    o_w = o_w.contiguous().unbind(0)
    q_w = w.query.transpose(2, 3).reshape(n_layers, inner_width, d_model).unbind(0)
    m_w = w.memory.t().contiguous()
    r_keys_all = w.position_keys.transpose(2, 3).contiguous()
    d_read_all = new(n_layers, rows, 1, width)
    d_read = d_read_all.unbind(0)
    d_read_heads = d_read_all.view(n_layers, n_heads, batch, width).unbind(0)
    d_q_step = new(rows, 1, width)
    d_q_step_heads = d_q_step.view(n_heads, batch, width)

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
        # The gradients that later tokens gave this one's keys and values reach its memory vector.
        d_slot_flat[t].copy_(d_slot[t])
        if w.norms_memory:
            g = torch.mm(d_projected[t], m_w)
            m, r = saved.memory_moments[t].unsqueeze(-1)
            g = _through_norm(g, saved.vectors[t], m, r)
            d_vector = torch.add(d_vectors[t], g, out=d_mixed[t])
        else:
            d_vector = torch.addmm(d_vectors[t], d_projected[t], m_w, out=d_mixed[t])
        torch.addcmul(d_out[t], d_vector, mix[-1], out=d_state[-1][t])
        for n in range(n_layers - 1, -1, -1):
            g = torch.mm(d_state[n][t], f_w[n], out=d_pre[n][t])
            _through_activation(g, post[n][t], activation)
            g = _through_norm(
                torch.mm(g, i_w[n]), middle[n][t], mean[2 * n + 1][t], rstd[2 * n + 1][t]
            )
            g = torch.add(d_state[n][t], g, out=d_middle[n][t])
            if n_keys:
                torch.bmm(g.expand(n_heads, -1, -1), o_w[n], out=d_read_heads[n])
                if t == 0 and has_memory is not None:
                    d_read_heads[n].mul_(has_memory[:, None])
                d_weight = torch.bmm(d_read[n], values[n])
                torch._softmax_backward_data(
                    d_weight, weight[n], -1, g.dtype, grad_input=d_scores[n]
                )
                torch.bmm(d_scores[n], keys[n], out=d_q_step)
                d_q_step_heads.baddbmm_(d_scores_heads[n], r_keys[n])
                d_q_heads[n][t].copy_(d_q_step_heads)
                if n:
                    g = g + _through_norm(
                        torch.mm(d_q[n][t], q_w[n]), state[n][t], mean[2 * n][t], rstd[2 * n][t]
                    )
            below = d_state[n - 1][t] if n else d_first[t]
            torch.addcmul(g, d_vector, mix[n], out=below)
        if n_keys:
            # All layers at once; with shared projections their sum is the product's inner sum.
            d_a = d_scores_all.view(n_layers, n_heads * batch, n_keys)
            d_s = _summed(d_a, query[t], groups)
            d_kv[0, :, :, low:high] += d_s
            d_kv[1, :, :, low:high] += _summed(
                probabilities[t].squeeze(2), d_read_all.squeeze(2), groups
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
    return Gradients(
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


class TokenStep:
    """One token through all layers without gradients: the recurrence for reading on.

    For frozen weights and a fixed number of rows. The weights' views and scratch space are made once;
    what a step returns must be copied before the next.
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
        self.read = new(n_heads * batch, 1, self.width)
        self.read_heads = self.read.view(self.heads)
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
        self, x: Tensor, kv: Tensor, absent: Tensor | None, vector: Tensor, slot: Tensor
    ) -> Tensor:
        """Read one token per row.

        Args:
            x: ``[B, D]``.
            kv: keys and values ``[2, G, H * B, N, K]`` of the tokens before.
            absent: bool ``[B, N]``, true where a row has no such token (None: nowhere).
            vector: where its memory vector goes, ``[B, D]``, contiguous.
            slot: where its keys and values go, ``[B, 2, G, H, K]``.

        Returns:
            The last layer's output ``[B, D]``, valid until the next call.
        """
        w, n_keys, size = self.weights, kv.shape[3], self.size
        rows = kv.shape[2]
        self.state[0].copy_(x)
        has_memory = None
        if n_keys:
            keys, values = kv[0].transpose(2, 3).unbind(0), kv[1].unbind(0)
            keys, values = (t * (self.n_layers // len(t)) for t in (keys, values))
            r_keys = w.position_keys[..., -n_keys:].unbind(0)
            r_scores = w.position_scores[..., -n_keys:].unbind(0)
        if absent is not None:
            has_memory = (~absent.all(-1)).to(x.dtype)
            self.attended[:, -1] = has_memory
        for n, (q_w, q_b, o_w, i_w, i_b, f_w) in enumerate(self.layers):
            middle = h = self.state[n]
            if n_keys:
                z = torch.native_layer_norm(h, size, None, None, self.eps)[0]
                q = torch.baddbmm(q_b, z.expand(self.heads[0], -1, -1), q_w)
                scores = torch.baddbmm(r_scores[n], q, r_keys[n])
                if absent is not None:
                    scores.masked_fill_(absent, torch.finfo(x.dtype).min / 4)
                scores = scores.view(rows, 1, n_keys)
                scores.baddbmm_(q.view(rows, 1, self.width), keys[n])
                torch.bmm(torch.softmax(scores, -1), values[n], out=self.read)
                self.head.copy_(self.read_heads)
                if has_memory is not None:
                    self.head.mul_(has_memory[:, None])
                middle = torch.addmm(h, self.attended, o_w, out=self.middle)
            z = torch.native_layer_norm(middle, size, None, None, self.eps)[0]
            torch.addmm(i_b, z, i_w, out=self.pre)
            if self.gelu:
                self.pre.copy_(F.gelu(self.pre))
            else:
                self.pre.relu_()
            torch.addmm(middle, self.activated, f_w, out=self.state[n + 1])
        if has_memory is not None:
            self.attended[:, -1] = 1
        torch.mv(self.flat_states, w.mix, out=vector.view(-1))
        if w.norms_memory:
            vector = torch.native_layer_norm(vector, size, None, None, self.eps)[0]
        torch.addmm(w.memory_bias, vector, self.memory, out=self.projected)
        slot.copy_(self.by_slot)
        return self.state[-1]


def _views(x: Tensor) -> list[tuple[Tensor, ...]]:
    """``[L, T, ...]`` as ``L`` lists of ``T`` views."""
    return [layer.unbind(0) for layer in x.unbind(0)]


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
