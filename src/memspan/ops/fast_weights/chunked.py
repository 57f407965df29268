"""The delta and the sum rule by chunks of tokens (Yang et al. 2024, arXiv 2406.06484), in PyTorch.

Matrix products and one triangular solve; the cost is linear in the length. The derivation is in
``docs/annotated/delta_rule.md``. Tensors of chunks are as in :mod:`memspan.ops.chunks`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memspan.ops.chunks import by_chunks
from memspan.ops.delta_rules.chunked import read_chunks
from memspan.ops.delta_rules.decays import HeadDecay
from memspan.ops.fast_weights.rules import RuleInputs
from memspan.ops.first_derivatives import apply, first_derivatives_only


def run(inputs: RuleInputs) -> tuple[Tensor, Tensor]:
    """Read all tokens; a document's start is a decay of zero."""
    inputs = inputs.by_value_head().with_decay()
    kind = inputs.v.dtype
    if inputs.beta is not None and kind.itemsize < 4:
        # No triangular solve is in half precision.
        inputs = inputs.to(torch.float32)
    decay = inputs.log_decay
    per_channel = decay is not None and decay.dim() == 4
    given = {}
    if inputs.beta is not None:
        given["beta"] = inputs.beta.unsqueeze(-1)
    if decay is not None:
        given["log_decay"] = decay if per_channel else decay.unsqueeze(-1)

    def read(
        weights: Tensor, q: Tensor, k: Tensor, v: Tensor, *strengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        q = inputs.features(q)
        k = inputs.features(k)
        if inputs.beta is not None and not per_channel:
            y, after = apply(_DeltaRule, weights, q, k, v, *strengths)
            return y, after
        return read_chunks(weights, q, k, v, **dict(zip(given, strengths, strict=True)))

    tensors = [inputs.q, inputs.k, inputs.v, *given.values()]
    y, after = by_chunks(
        read, inputs.weights, tensors, inputs.chunking.size, inputs.chunking.recompute
    )
    return y.to(kind), after.to(kind)


class _DeltaRule(torch.autograd.Function):
    """A chunk writes ``u = beta z``, where ``z = (I + tril(K K^T, -1) diag(beta))^-1 (V - K S)``.

    The inverse ``R`` is computed for all chunks at once, as is everything that does not depend on
    ``S``: what remains chunk by chunk is ``z = R (V - K S)`` and ``S' = S + K^T u``, and their reverse
    in the backward pass. Nothing is divided by beta, which may be zero.

    With a decay, ``K K^T`` and ``Q K^T`` are multiplied by the decay between two tokens, and
    ``S`` by that since the chunk began.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weights: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        log_decay: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        decay = None if log_decay is None else HeadDecay(log_decay)
        gram = (k @ k.mT).tril_(-1)
        scores = (q @ k.mT).tril_()
        reading = k
        asking = q
        writing = k
        if decay is not None:
            gram = gram * decay.between
            scores = scores * decay.between
            reading = k * decay.from_start
            asking = q * decay.from_start
            writing = k * decay.to_end
        eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device).expand_as(gram)
        inverse = torch.linalg.solve_triangular(
            gram * beta.mT, eye, upper=False, unitriangular=True
        )
        before = []
        changes = []
        chunks = zip(*map(Tensor.unbind, (reading, v, beta, inverse, writing)), strict=True)
        for n, (reading_n, v_n, beta_n, inverse_n, writing_n) in enumerate(chunks):
            before.append(weights)
            z = torch.bmm(inverse_n, torch.baddbmm(v_n, reading_n, weights, alpha=-1))
            if decay is not None:
                weights = decay.whole(n, weights)
            weights = torch.baddbmm(weights, writing_n.mT, beta_n * z)
            changes.append(z)
        z = torch.stack(changes)
        s = torch.stack(before)
        y = _add_product(scores @ (beta * z), asking, s)
        ctx.save_for_backward(log_decay, q, k, beta, gram, inverse, scores, z, s)
        return y, weights

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, d_y: Tensor, d_weights: Tensor) -> tuple[Tensor | None, ...]:
        return _delta_rule_backward(ctx.saved_tensors, d_y.contiguous(), d_weights)


def _delta_rule_backward(
    saved: tuple[Any, ...], d_y: Tensor, d_weights: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of all inputs; names as in the forward pass."""
    log_decay, q, k, beta, gram, inverse, scores, z, s = saved
    decay = None if log_decay is None else HeadDecay(log_decay)
    reading = k
    asking = q
    writing = k
    if decay is not None:
        reading = k * decay.from_start
        asking = q * decay.from_start
        writing = k * decay.to_end
    # The parts of du and dS that come from reading.
    read_u = scores.mT @ d_y
    read_s = asking.mT @ d_y
    d_after = []
    d_us = []
    d_vs = []
    chunks = zip(
        *(reversed(t.unbind()) for t in (reading, writing, beta, inverse, read_u, read_s)),
        strict=True,
    )
    for n, (reading_n, writing_n, beta_n, inverse_n, read_u_n, read_s_n) in enumerate(chunks, 1):
        d_after.append(d_weights)
        d_us.append(torch.baddbmm(read_u_n, writing_n, d_weights))
        d_vs.append(torch.bmm(inverse_n.mT, beta_n * d_us[-1]))
        if decay is not None:
            d_weights = decay.whole(-n, d_weights)
        d_weights = torch.baddbmm(d_weights + read_s_n, reading_n.mT, d_vs[-1], alpha=-1)
    d_u, d_v, d_s = (torch.stack(t[::-1]) for t in (d_us, d_vs, d_after))
    u = beta * z
    d_beta = (z * (d_u - gram.mT @ d_v)).sum(-1, keepdim=True)
    d_scores = (d_y @ u.mT).tril_()
    d_gram = (d_v @ u.mT).tril_(-1)
    if decay is None:
        d_gram = d_gram + d_gram.mT
        d_q = _add_product(d_scores @ k, d_y, s.mT)
        d_k = _add_product(d_scores.mT @ q, u, d_s.mT)
        _add_product(_add_product(d_k, d_v, s.mT, -1.0), d_gram, k, -1.0)
        return d_weights, d_q, d_k, d_v, d_beta
    d_asked = decay.from_start * (d_y @ s.mT)
    d_read = decay.from_start * (d_v @ s.mT)
    d_written = decay.to_end * (u @ d_s.mT)
    # Of the logarithm of the decay from token j to token i. To itself it is 1: what would cancel below
    # is far larger than gradients of strong decays.
    d_between = (d_scores * scores - d_gram * gram).tril_(-1)
    d_since = (q * d_asked - k * d_read).sum(-1)
    d_until = (k * d_written).sum(-1)
    d_whole = (decay.from_start[..., -1:, :] * s * d_s).sum((-1, -2))
    d_scores = d_scores * decay.between
    d_gram = d_gram * decay.between
    d_q = _add_product(d_asked, d_scores, k)
    d_k = _add_product(d_written - d_read, d_scores.mT, q)
    _add_product(d_k, d_gram + d_gram.mT, k, -1.0)
    # Token t decays what goes from earlier tokens, or the chunk's start, to t or later tokens.
    d_to = d_between.sum(-1) + d_since - d_between.sum(-2)
    d_earlier = F.pad(d_until[..., :-1].cumsum(-1), (1, 0))
    d_log = d_to.flip(-1).cumsum(-1).flip(-1) + d_earlier + d_whole.unsqueeze(-1)
    return d_weights, d_q, d_k, d_v, d_beta, d_log.unsqueeze(-1)


def _add_product(x: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """``x + alpha a b``, in place."""
    x.flatten(0, 1).baddbmm_(a.flatten(0, 1), b.flatten(0, 1), alpha=alpha)
    return x
