"""The Feedback Transformer's recurrence for single tokens without gradients, in PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from memspan.ops.feedback.buffers import FoldedWeights


class TokenStep:
    """One token through all layers without gradients: the recurrence for reading on.

    For frozen weights and a fixed number of rows. The weights' views and scratch space are made once;
    what a step returns must be copied before the next.
    """

    def __init__(self, weights: FoldedWeights, batch: int, activation: str, eps: float) -> None:
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
                z = self._norm_before(h)
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
            middle = self._norm_after(0, n, middle)
            torch.addmm(i_b, self._norm_before(middle), i_w, out=self.pre)
            if self.gelu:
                self.pre.copy_(F.gelu(self.pre))
            else:
                self.pre.relu_()
            torch.addmm(middle, self.activated, f_w, out=self.state[n + 1])
            if w.post_norm:
                self.state[n + 1].copy_(self._norm_after(1, n, self.state[n + 1]))
        if has_memory is not None:
            self.attended[:, -1] = 1
        torch.mv(self.flat_states, w.mix, out=vector.view(-1))
        if w.norms_memory:
            vector = torch.native_layer_norm(vector, size, None, None, self.eps)[0]
        torch.addmm(w.memory_bias, vector, self.memory, out=self.projected)
        slot.copy_(self.by_slot)
        return self.state[-1]

    def _norm_before(self, x: Tensor) -> Tensor:
        """What a sub-layer is given: with post-norm ``x`` itself."""
        if self.weights.post_norm:
            return x
        return torch.native_layer_norm(x, self.size, None, None, self.eps)[0]

    def _norm_after(self, part: int, n: int, x: Tensor) -> Tensor:
        """Post-norm of what sub-layer ``part`` added to; with pre-norm ``x`` itself."""
        w = self.weights
        if not w.post_norm:
            return x
        gain, bias = w.gains[part, n], w.biases[part, n]
        return torch.native_layer_norm(x, self.size, gain, bias, self.eps)[0]
