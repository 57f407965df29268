"""The delta and the sum rule by chunks of tokens (Yang et al. 2024, arXiv 2406.06484), in PyTorch.

Matrix products and one triangular solve; the cost is linear in the length. The derivation is in
``docs/annotated/delta_rule.md``. Inside, tensors are ``[N, M, G, ...]``: ``N`` chunks of ``G`` tokens,
``M = B * H`` heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from memspan.ops.fast_weights.rules import RuleInputs
from memspan.ops.first_derivatives import apply, first_derivatives_only

CACHE_BYTES = 1 << 20
"""On a CPU, as many chunks are processed at once as have memories of this size in total."""
RECOMPUTED_CHUNKS = 16
"""With ``recompute``, chunks between two memories that are saved for backward."""


def run(inputs: RuleInputs) -> tuple[Tensor, Tensor]:
    """Divide ``[B, H, T, ...]`` into chunks, run over them, and put the outputs together again.

    The tokens after the last full chunk form a shorter one: nothing is padded.
    """
    inputs = inputs.by_value_head().with_decay()
    kind = inputs.v.dtype
    if inputs.beta is not None and kind.itemsize < 4:
        # No triangular solve is in half precision.
        inputs = inputs.to(torch.float32)
    batch, n_heads, length = inputs.q.shape[:3]
    tensors = [inputs.q, inputs.k, inputs.v]
    tensors += [x.unsqueeze(-1) for x in (inputs.beta, inputs.log_decay) if x is not None]
    recompute = inputs.chunking.recompute
    size = min(inputs.chunking.size, length)
    full = length - length % size
    block = size * _chunks_at_once(inputs.weights, recompute)
    lengths = [min(block, full - start) for start in range(0, full, block)]
    lengths += [length - full] if full < length else []

    def run_block(
        weights: Tensor, q: Tensor, k: Tensor, v: Tensor, *strengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        q = inputs.features(q)
        k = inputs.features(k)
        if inputs.beta is None:
            return _sum_rule(q, k, v, weights, *strengths)
        y, after = apply(_DeltaRule, weights, q, k, v, *strengths)
        return y, after

    weights = inputs.weights.flatten(0, 1)
    outputs = []
    # Split once: the backward of slices would write a gradient of the full length for each.
    for blocks in zip(*(t.split(lengths, 2) for t in tensors), strict=True):
        chunks = [_to_chunks(t, min(size, t.shape[2])) for t in blocks]
        if recompute:
            y, weights = checkpoint(  # type: ignore[misc]
                run_block, weights, *chunks, use_reentrant=False, preserve_rng_state=False
            )
        else:
            y, weights = run_block(weights, *chunks)
        outputs.append(_from_chunks(y, batch, n_heads))
    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
    return y.transpose(1, 2).to(kind), weights.view(inputs.weights.shape).to(kind)


def _chunks_at_once(weights: Tensor, recompute: bool) -> int:
    """On a CPU, as many as its cache holds; elsewhere all."""
    if recompute:
        return RECOMPUTED_CHUNKS
    memory = weights.numel() * weights.element_size()
    # Exports may leave the number of rows free.
    if weights.device.type != "cpu" or not isinstance(memory, int):
        return 1 << 30
    return max(1, CACHE_BYTES // max(1, memory))


def _to_chunks(x: Tensor, size: int) -> Tensor:
    """``[B, H, N * G, K] -> [N, B * H, G, K]``."""
    return x.unflatten(2, (-1, size)).permute(2, 0, 1, 3, 4).flatten(1, 2).contiguous()


def _from_chunks(y: Tensor, batch: int, n_heads: int) -> Tensor:
    """``[N, B * H, G, V] -> [B, N * G, H, V]``, the order in memory that the next product needs."""
    n_chunks, _, size, width = y.shape
    y = y.view(n_chunks, batch, n_heads, size, width)
    return y.permute(1, 0, 3, 2, 4).flatten(1, 2)


def _sum_rule(
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor, log_decay: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``Y = Q S + tril(Q K^T) V``, ``S' = S + K^T V``; with decays as in the delta rule."""
    scores = (q @ k.mT).tril()
    if log_decay is None:
        after = weights + (k.mT @ v).cumsum(0)
        before = torch.cat([weights[None], after[:-1]])
        return q @ before + scores @ v, after[-1]
    decay = _Decay.of(log_decay)
    befores = []
    for whole, written in zip(decay.whole, (k * decay.until).mT @ v, strict=True):
        befores.append(weights)
        weights = whole * weights + written
    return (q * decay.since) @ torch.stack(befores) + (scores * decay.between) @ v, weights


class _DeltaRule(torch.autograd.Function):
    """A chunk writes ``u = beta z``, where ``z = (I + tril(K K^T, -1) diag(beta))^-1 (V - K S)``.

    The inverse ``R`` is computed for all chunks at once, as is everything that does not depend on
    ``S``: what remains chunk by chunk is ``z = R (V - K S)`` and ``S' = S + K^T u``, and their reverse
    in the backward pass. Nothing is divided by beta, which may be zero.

    With a decay, ``K K^T`` and ``Q K^T`` are multiplied by the :class:`_Decay` between two tokens, and
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
        decay = None if log_decay is None else _Decay.of(log_decay)
        gram = (k @ k.mT).tril_(-1)
        scores = (q @ k.mT).tril_()
        reading = k
        asking = q
        writing = k
        if decay is not None:
            gram = gram * decay.between
            scores = scores * decay.between
            reading = k * decay.since
            asking = q * decay.since
            writing = k * decay.until
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
                weights = decay.whole[n] * weights
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
    decay = None if log_decay is None else _Decay.of(log_decay)
    reading = k
    asking = q
    writing = k
    if decay is not None:
        reading = k * decay.since
        asking = q * decay.since
        writing = k * decay.until
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
            d_weights = decay.whole[-n] * d_weights
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
    d_asked = decay.since * (d_y @ s.mT)
    d_read = decay.since * (d_v @ s.mT)
    d_written = decay.until * (u @ d_s.mT)
    # Of the logarithm of the decay from token j to token i.
    d_between = d_scores * scores - d_gram * gram
    d_since = (q * d_asked - k * d_read).sum(-1)
    d_until = (k * d_written).sum(-1)
    d_whole = (decay.whole * s * d_s).sum((-1, -2))
    d_scores = d_scores * decay.between
    d_gram = d_gram * decay.between
    d_q = _add_product(d_asked, d_scores, k)
    d_k = _add_product(d_written - d_read, d_scores.mT, q)
    _add_product(d_k, d_gram + d_gram.mT, k, -1.0)
    # Token t decays what goes from earlier tokens, or the chunk's start, to t or later tokens.
    d_to = d_between.sum(-1) + d_since - d_between.sum(-2) - d_until
    d_log = d_to.flip(-1).cumsum(-1).flip(-1) + (d_until.sum(-1) + d_whole).unsqueeze(-1)
    return d_weights, d_q, d_k, d_v, d_beta, d_log.unsqueeze(-1)


@dataclass(frozen=True)
class _Decay:
    """The products of decays within a chunk.

    Their logarithms are sums over just the tokens that they span: a difference of sums from the chunk's
    start would lose what is small beside a strong decay further back.
    """

    between: Tensor
    """From token j to token i, without j's own: ``[N, M, G, G]``, 0 above the diagonal."""
    since: Tensor
    """From the chunk's start to each token, ``[N, M, G, 1]``."""
    until: Tensor
    """From each token to the chunk's end, ``[N, M, G, 1]``."""
    whole: Tensor
    """``[N, M, 1, 1]``"""

    @classmethod
    def of(cls, log_decay: Tensor) -> _Decay:
        """From the logarithms ``[N, M, G, 1]``."""
        size = log_decay.shape[-2]
        later = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).triu()
        # Masked, not multiplied by 0: a logarithm may be -inf.
        spans = log_decay.expand(-1, -1, -1, size).masked_fill(later, 0.0).cumsum(-2)
        between = spans.masked_fill(later.triu(1), -torch.inf).exp()
        since = log_decay.cumsum(-2).exp()
        return cls(between, since, between[..., -1:, :].mT, since[..., -1:, :])


def _add_product(x: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """``x + alpha a b``, in place."""
    x.flatten(0, 1).baddbmm_(a.flatten(0, 1), b.flatten(0, 1), alpha=alpha)
    return x
