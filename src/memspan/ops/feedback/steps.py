"""The Feedback Transformer's recurrence step by step, in PyTorch: forward and backward.
``docs/annotated/feedback_backward.md`` derives them; names and order agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memspan.ops.feedback.buffers import Buffers, Options, by_slot
from memspan.ops.feedback.dropout import drop


def new_slots(like: Tensor, *sizes: int) -> Tensor:
    """Keys and values of ``N`` slots: ``[2, G, H * B, N, K]``."""
    return like.new_empty(2, *sizes)


class _Loop:
    """Views and factors that both directions use; ``n`` is a layer, ``s`` a sub-layer and ``t`` a step.

    Every buffer is cut into views of all its steps at once, which is cheaper than selecting them
    step by step.
    """

    def __init__(self, b: Buffers, options: Options) -> None:
        self.b = b
        self.options = options
        self.n_layers, self.n_heads, d_model, self.width = b["query"].shape
        _, self.n_steps, self.batch, _ = b["streams"].shape
        self.size = (d_model,)
        self.heads = (self.n_heads, self.width)
        self.stream = _views(b["streams"])
        self.post_norm = "sums" in b
        # Where the residual sums go: post-norm normalises them.
        self.sum = _views(b["sums"]) if self.post_norm else self.stream[1:]
        self.gain, self.bias = (
            _alternately(*b[name]) if self.post_norm else [] for name in ("gains", "biases")
        )
        self.post = _views(b["activated"][..., :-1])
        self.pre = _views(b["before"]) if "before" in b else self.post
        self.query = b["queries"].unbind(0)
        self.position_keys = b["position_keys"]
        # Factors of dropout; None: nothing is dropped.
        attention, activated, feed_forward = (
            self._factors(name, options.scale)
            for name in ("attention", "activated", "feed_forward")
        )
        self.activated_factor = self._per_step(activated)
        self.factor = _alternately(self._per_step(attention), self._per_step(feed_forward))

    def _factors(self, name: str, scale: float) -> Tensor | None:
        kept = self.b.get(f"kept_{name}")
        return None if kept is None else kept.to(self.b["streams"].dtype).mul_(scale)

    def _per_step(self, x: Tensor | None) -> Sequence[Sequence[Tensor | None]]:
        return [[None] * self.n_steps] * self.n_layers if x is None else _views(x)

    def see(self, given: Buffers) -> None:
        """Set keys and values, and the number of slots that rows see."""
        self.kv = given["kv"]
        self.n_old = given["kv"].shape[3] - self.n_steps
        self.visible = given.get("visible")
        # For each step: the slots that any row may see, its attention weights and their dropout
        # factors, [L, H * B, 1, n].
        self.n_keys = [min(self.options.span, self.n_old + t) for t in range(self.n_steps)]
        rows = self.n_heads * self.batch
        sizes = [self.n_layers * rows * n for n in self.n_keys]
        parts = zip(self.b["probabilities"][: sum(sizes)].split(sizes), self.n_keys, strict=True)
        self.weights = [part.view(self.n_layers, rows, 1, n) for part, n in parts]
        self.weight_factors: list[Tensor | None] = [None] * self.n_steps
        if (factors := self._factors("weights", self.options.weights_scale)) is not None:
            kept = zip(factors, self.n_keys, strict=True)
            self.weight_factors = [f[:, :, None, f.shape[2] - n :] for f, n in kept]

    def look_back(self, t: int) -> None:
        """Cut what a step attends to, layer by layer: keys and values ``[H * B, n, K]``, of the
        position tables ``[H, K, n]`` and ``[H, 1, n]``, weights ``p [H * B, 1, n]``, factors; and what
        each row does not see of it, ``[B, n]``."""
        n_keys = self.n_keys[t]
        factors = self.weight_factors[t]
        first = self.options.span - n_keys
        self.low = self.n_old + t - n_keys
        slots = self.kv.narrow(3, self.low, n_keys).expand(-1, self.n_layers, -1, -1, -1)
        self.keys, self.values = (each.unbind(0) for each in slots)
        self.table_keys = self.position_keys.narrow(3, first, n_keys).unbind(0)
        self.table_scores = self.b["position_scores"].narrow(3, first, n_keys).unbind(0)
        self.p = self.weights[t].unbind(0)
        self.factors = [None] * self.n_layers if factors is None else factors.unbind(0)
        if self.visible is not None:
            unseen = n_keys - self.visible[t, :, None]
            self.hidden = torch.arange(n_keys, device=unseen.device) < unseen
            self.sees_any = self.visible[t, :, None] > 0


def prepare(buffers: Buffers, options: Options) -> Callable[[Buffers], None]:
    """The loop forward, which fills the buffers from ``streams[0]`` on. It is called with ``kv`` and
    any ``visible``; reading on, for each segment."""
    return _Forward(buffers, options)


class _Forward(_Loop):
    """The loop forward and the parts of one step."""

    def __init__(self, b: Buffers, options: Options) -> None:
        super().__init__(b, options)
        new = b["streams"].new_empty
        self.states_of_step = b["streams"][::2].flatten(2).unbind(1)
        head = b["attended"][..., :-1].unflatten(-1, self.heads).transpose(-3, -2)
        self.head = _views(head)
        self.vector = b["vectors"].unbind(0)
        # The inputs and the weights of each sub-layer's second product.
        self.product = _alternately(_views(b["attended"]), _views(b["activated"]))
        self.outer = _alternately(b["output"].unbind(0), b["outer"].unbind(0))
        by_head = (self.n_steps, self.n_layers, self.n_heads, self.batch, self.width)
        self.query_heads = _views(b["queries"].view(by_head))
        self.query_row = _views(b["queries"].unsqueeze(3))
        self.q_w = b["query"].unbind(0)
        self.q_b = b["query_bias"].unbind(0)
        self.i_w = b["inner"].unbind(0)
        self.i_b = b["inner_bias"].unbind(0)

        self.projected = new(self.batch, b["memory"].shape[1])
        self.projected_slot = self.projected.view(self.batch, 2, -1, *self.heads)
        self.read = new(self.n_heads * self.batch, 1, self.width)
        self.read_heads = self.read.view(self.n_heads, self.batch, self.width)

    def __call__(self, given: Buffers) -> None:
        """Compute all steps."""
        self.see(given)
        self.slot = by_slot(self.kv[..., self.n_old :, :], self.batch).unbind(0)
        # Reading on may be under autocast.
        with torch.autocast(self.kv.device.type, enabled=False):
            self.first_queries()
            for t in range(self.n_steps):
                self.look_back(t)
                for n in range(self.n_layers):
                    self.attention(n, t)
                    self.feed_forward(n, t)
                self.memory_vector(t)

    def first_queries(self) -> None:
        """The first layer's queries, for all steps at once: they do not depend on the recurrence."""
        z = self.norm_before(self.b["streams"][0]).view(1, -1, *self.size)
        first = torch.baddbmm(self.q_b[0], z.expand(self.n_heads, -1, -1), self.q_w[0])
        self.b["queries"][:, 0].view(self.n_steps, self.n_heads, self.batch, self.width).copy_(
            first.view(self.n_heads, self.n_steps, self.batch, self.width).transpose(0, 1)
        )

    def attention(self, n: int, t: int) -> None:
        """``h + W_o softmax(q . k + q . R + S) v``; ``h`` itself where it attends to nothing."""
        if not self.n_keys[t]:
            self.sum[2 * n][t].copy_(self.stream[2 * n][t])
            self.norm_after(2 * n, t)
            return
        query = self.query_heads[t][n]
        weights = self.p[n]
        if n:
            z = self.norm_before(self.stream[2 * n][t])
            torch.baddbmm(self.q_b[n], z.expand(self.n_heads, -1, -1), self.q_w[n], out=query)
        by_row = torch.baddbmm(self.table_scores[n], query, self.table_keys[n])
        scores = by_row.view(weights.shape).baddbmm_(self.query_row[t][n], self.keys[n].mT)
        if self.visible is not None:
            # Their exponential is zero. It is finite: a row that sees nothing must not become NaN.
            by_row.masked_fill_(self.hidden, torch.finfo(by_row.dtype).min)
        torch.softmax(scores, -1, out=weights)
        if self.visible is not None:
            weights.view(by_row.shape).mul_(self.sees_any)
        torch.bmm(drop(weights, self.factors[n]), self.values[n], out=self.read)
        self.head[n][t].copy_(self.read_heads)
        self.add_product(2 * n, t)

    def feed_forward(self, n: int, t: int) -> None:
        """``h + W_2 f(W_1 z + b_1) + b_2``."""
        pre = self.pre[n][t]
        factor = self.activated_factor[n][t]
        z = self.norm_before(self.stream[2 * n + 1][t])
        torch.addmm(self.i_b[n], z, self.i_w[n], out=pre)
        if self.options.activation == "gelu":
            self.post[n][t].copy_(F.gelu(pre))
        else:
            pre.relu_()
        if factor is not None:
            self.post[n][t].mul_(factor)
        self.add_product(2 * n + 1, t)

    def add_product(self, s: int, t: int) -> None:
        """The residual sum after a sub-layer, with what dropout keeps of its product."""
        h = self.stream[s][t]
        factor = self.factor[s][t]
        out = self.sum[s][t]
        if factor is None:
            torch.addmm(h, self.product[s][t], self.outer[s], out=out)
        else:
            torch.addcmul(h, torch.mm(self.product[s][t], self.outer[s]), factor, out=out)
        self.norm_after(s, t)

    def norm_before(self, x: Tensor) -> Tensor:
        """The input that a sub-layer multiplies: ``x`` normalised, or with post-norm ``x`` itself."""
        return x if self.post_norm else F.layer_norm(x, self.size, eps=self.options.eps)

    def norm_after(self, s: int, t: int) -> None:
        """Post-norm of the sum; with pre-norm that is the next sub-layer's stream already."""
        if self.post_norm:
            given = self.sum[s][t], self.size, self.gain[s], self.bias[s], self.options.eps
            self.stream[s + 1][t].copy_(F.layer_norm(*given))

    def memory_vector(self, t: int) -> None:
        """``m(t)``, the mix of the token's states, and its keys and values."""
        b = self.b
        vector = self.vector[t]
        torch.mv(self.states_of_step[t].t(), b["mix"], out=vector.view(-1))
        if self.options.norms_memory:
            vector = F.layer_norm(vector, self.size, eps=self.options.eps)
        torch.addmm(b["memory_bias"], vector, b["memory"], out=self.projected)
        self.slot[t].copy_(self.projected_slot)


def backward(buffers: Buffers, options: Options, gradients: Buffers) -> None:
    """Gradients by all steps, from last to first.

    Args:
        buffers: what the loop forward was given and left, and ``options``.
        gradients: of ``new_gradients``, which are filled.
    """
    loop = _Backward(buffers, options, gradients)
    mix = buffers["mix"].unbind(0)
    for t in range(loop.n_steps - 1, -1, -1):
        loop.look_back(t)
        d_vector = loop.memory_vector(t)
        loop.d_stream[-1][t].addcmul_(d_vector, mix[-1])
        for n in range(loop.n_layers - 1, -1, -1):
            loop.feed_forward(n, t)
            g = loop.attention(n, t)
            torch.addcmul(g, d_vector, mix[n], out=loop.d_stream[2 * n][t])
        if loop.n_keys[t]:
            loop.keys_and_values(t)
    loop.first_queries()


class _Backward(_Loop):
    """The parts of one step backward, named as those of :class:`_Forward`."""

    def __init__(self, b: Buffers, options: Options, d: Buffers) -> None:
        super().__init__(b, options)
        self.see(b)
        self.d = d
        rows = self.n_heads * self.batch
        new = b["streams"].new_empty
        if self.n_old == 0:
            d["d_query"][:, 0] = 0
        # Mean and rstd of the inputs of each norm, computed again.
        normed = b["sums"] if self.post_norm else b["streams"][:-1]
        self.first, *_ = moments = [self.moments(x) for x in (*normed, b["vectors"])]
        *self.moment, self.vector_moment = (list(zip(*pair, strict=True)) for pair in moments)
        self.vector = b["vectors"].unbind(0)

        self.d_stream = _views(d["d_streams"])
        self.d_added = _views(d["d_added"])
        self.d_pre = _views(d["d_inner"])
        self.d_q = _views(d["d_query"])
        self.d_q_heads = _views(d["d_query"].unflatten(-1, self.heads).transpose(-3, -2))
        self.d_slot = by_slot(d["d_kv"][..., self.n_old :, :], self.batch).unbind(0)
        self.d_slot_flat = d["d_projected"].unflatten(2, (2, -1, *self.heads)).unbind(0)
        # The transposes, laid out once.
        self.f_w = b["outer"][:, :-1].transpose(1, 2).contiguous().unbind(0)
        self.i_w = b["inner"].transpose(1, 2).contiguous().unbind(0)
        o_w = b["output"][:, :-1].unflatten(1, self.heads).transpose(2, 3)
        self.o_w = o_w.contiguous().unbind(0)
        self.q_w = b["query"].transpose(2, 3).flatten(1, 2).unbind(0)
        self.m_w = b["memory"].t().contiguous()
        self.position_keys = b["position_keys"].mT.contiguous().mT
        # Gradients of one step: of the vectors that the heads read, of queries and of scores.
        self.d_read_all = new(self.n_layers, rows, 1, self.width)
        self.d_read = self.d_read_all.unbind(0)
        self.d_read_heads = self.d_read_all.view(-1, self.n_heads, self.batch, self.width).unbind(0)
        self.d_q_step = new(rows, 1, self.width)
        self.d_q_step_heads = self.d_q_step.view(self.n_heads, self.batch, self.width)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        _, mean, rstd = torch.native_layer_norm(x, self.size, None, None, self.options.eps)
        return mean, rstd

    def look_back(self, t: int) -> None:
        """The same, with room for the gradients of its scores."""
        super().look_back(t)
        self.d_scores = torch.empty_like(self.weights[t])

    def memory_vector(self, t: int) -> Tensor:
        """``dm(t)``: through keys and values from the tokens after, and from outside."""
        self.d_slot_flat[t].copy_(self.d_slot[t])
        d_projected = self.d["d_projected"][t]
        out = self.d["d_vectors"][t]
        if not self.options.norms_memory:
            return torch.addmm(out, d_projected, self.m_w, out=out)
        g = torch.mm(d_projected, self.m_w)
        return out.add_(_through_norm(g, self.vector[t], *self.vector_moment[t]))

    def feed_forward(self, n: int, t: int) -> None:
        """``g + norm'(W_1^T da)`` with ``da = f'(...) W_2^T g``: the gradient of the stream before."""
        above, added = self.through_sum(2 * n + 1, t)
        g = self.d_pre[n][t]
        factor = self.activated_factor[n][t]
        x = self.pre[n][t]
        torch.mm(added, self.f_w[n], out=g)
        if factor is not None:
            g.mul_(factor)
        # x is what went into gelu, and what came out of relu.
        if self.options.activation == "gelu":
            g.copy_(torch.ops.aten.gelu_backward.default(g, x))
        else:
            torch.ops.aten.threshold_backward.grad_input(g, x, 0, grad_input=g)
        d_z = self.through_norm_before(2 * n + 1, t, torch.mm(g, self.i_w[n]))
        torch.add(above, d_z, out=self.d_stream[2 * n + 1][t])

    def attention(self, n: int, t: int) -> Tensor:
        """``g + norm'(W_q^T dq)``, but for the first layer; scores' gradients stay for the end."""
        above, added = self.through_sum(2 * n, t)
        if not self.n_keys[t]:
            # Nothing was added, whatever this is.
            return above
        read = self.d_read_heads[n]
        d_scores = self.d_scores[n]
        torch.bmm(added.expand(self.n_heads, -1, -1), self.o_w[n], out=read)
        d_weight = drop(torch.bmm(self.d_read[n], self.values[n].mT), self.factors[n])
        torch._softmax_backward_data(d_weight, self.p[n], -1, above.dtype, grad_input=d_scores)
        torch.bmm(d_scores, self.keys[n], out=self.d_q_step)
        by_head = d_scores.view(self.n_heads, self.batch, self.n_keys[t])
        self.d_q_step_heads.baddbmm_(by_head, self.table_keys[n].mT)
        self.d_q_heads[n][t].copy_(self.d_q_step_heads)
        if not n:
            return above
        return above + self.through_norm_before(2 * n, t, torch.mm(self.d_q[n][t], self.q_w[n]))

    def through_sum(self, s: int, t: int) -> tuple[Tensor, Tensor]:
        """Gradients of the residual sum that a sub-layer adds to, and of what it adds."""
        g = self.d_stream[s + 1][t]
        added = self.d_added[s][t]
        factor = self.factor[s][t]
        if self.post_norm:
            g = _through_norm(g, self.sum[s][t], *self.moment[s][t], self.gain[s])
        if factor is not None:
            torch.mul(g, factor, out=added)
        elif self.post_norm:
            added.copy_(g)
        return g, added

    def through_norm_before(self, s: int, t: int, g: Tensor) -> Tensor:
        return g if self.post_norm else _through_norm(g, self.stream[s][t], *self.moment[s][t])

    def keys_and_values(self, t: int) -> None:
        """``dk``, ``dv``, ``dR`` and ``dS`` of all that the token attended to.

        All layers at once; with shared projections their sum is the product's inner sum.
        """
        n_layers = self.n_layers
        n_heads = self.n_heads
        n_keys = self.n_keys[t]
        query = self.query[t]
        first = self.options.span - n_keys
        weights = drop(self.weights[t], self.weight_factors[t])
        d_scores = self.d_scores.squeeze(2)
        d_read = self.d_read_all.squeeze(2)
        d_keys, d_values = self.d["d_kv"].narrow(3, self.low, n_keys).unbind(0)
        d_keys.add_(_summed(d_scores, query, len(d_keys)))
        d_values.add_(_summed(weights.squeeze(2), d_read, len(d_keys)))
        by_head = d_scores.view(n_layers * n_heads, self.batch, n_keys)
        by_row = query.view(n_layers * n_heads, self.batch, self.width)
        self.d["d_position_keys"].narrow(3, first, n_keys).add_(
            torch.bmm(by_row.mT, by_head).view(n_layers, n_heads, self.width, n_keys)
        )
        self.d["d_position_scores"].narrow(3, first, n_keys).add_(
            by_head.sum(1).view(n_layers, n_heads, 1, n_keys)
        )

    def first_queries(self) -> None:
        """The first layer's norm and query, for all steps at once."""
        g = torch.matmul(self.d["d_query"][0], self.q_w[0])
        if not self.post_norm:
            g = _through_norm(g, self.b["streams"][0], *self.first)
        self.d["d_streams"][0] += g


def _views(x: Tensor) -> list[tuple[Tensor, ...]]:
    """``[L, T, ...]`` as ``L`` lists of ``T`` views."""
    return [layer.unbind(0) for layer in x.unbind(0)]


def _alternately(a: Iterable[Any], b: Iterable[Any]) -> list[Any]:
    """Interleave entries of attention and feed-forward, layer by layer."""
    return [each for pair in zip(a, b, strict=True) for each in pair]


def _summed(a: Tensor, b: Tensor, groups: int) -> Tensor:
    """``a_l^T b_l`` per row, summed over a group's layers: ``[L, R, N], [L, R, K] -> [G, R, N, K]``."""
    if groups == len(a):
        return a.unsqueeze(-1) * b.unsqueeze(2)
    return torch.bmm(a.permute(1, 2, 0), b.permute(1, 0, 2)).unsqueeze(0)


def _through_norm(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, gain: Tensor | None = None
) -> Tensor:
    """Gradient of what a norm was given."""
    size = x.shape[-1:]
    backward = torch.ops.aten.native_layer_norm_backward.default
    return backward(g, x, size, mean, rstd, gain, None, (True, False, False))[0]
