"""Attention with relative positions (Dai et al. 2019, section 3.3): the reference and its fast paths.

For query ``i`` of ``T`` and key ``j`` of ``S``, keys being ordered ``[memory | segment]`` so that
query ``i`` stands at key ``S - T + i`` and the distance is ``d = S - T + i - j``::

    A_ij = scale * ( (q_i + u) . k_j  +  (q_i + v) . R_d  +  S_d )        attention(i) = softmax_j(A) V

``R`` is the projected sinusoid of the distance or a learned table, ``u`` and ``v`` are the paper's
global biases, ``S_d`` the bias per distance of the learned variant. Causal attention has distances of 0
and more; keys of a query's future, where a mask lets it see them, have negative ones. Symbols in code:
``R = position_keys``, ``S_d = position_scores``, ``u = content_bias``, ``v = position_bias``.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from memspan.errors import MemspanError, refuse_unknown
from memspan.precision.products import float32_matmul_precision

CACHE_BYTES = 2 << 20
"""Scores that are worked on at once on a CPU; half or twice as much costs little."""

Implementation = Literal["reference", "fused", "sdpa"]


def relative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_keys: Tensor,
    *,
    content_bias: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_scores: Tensor | None = None,
    mask: Tensor | None = None,
    n_future: int = 0,
    scale: float | None = None,
    dropout: float = 0.0,
    implementation: Implementation | None = None,
    received: Tensor | None = None,
) -> Tensor:
    """Attend with content and distance.

    Args:
        q: queries ``[B, H, T, K]``.
        k: keys ``[B, H, S, K]``, ``S >= T``, oldest first.
        v: values ``[B, H, S, K]``.
        position_keys: ``R``, ``[H, F + S, K]`` for the distances ``-F .. S-1``, nearest first: row
            ``F + d`` belongs to distance ``d``.
        content_bias: ``u``, ``[H, K]``.
        position_bias: ``v``, ``[H, K]``.
        position_scores: ``S_d``, ``[H, F + S]``, in the order of ``position_keys``.
        mask: bool ``[B or 1, T, S]``, true where a query may attend: not to keys more than ``F`` in
            its future, and every query to something. None: every query attends to every key, which
            needs ``F = T - 1``.
        n_future: F, the number of negative distances, 0 to ``T - 1``; 0 for causal attention.
        scale: factor on the scores (None: ``K ** -0.5``).
        dropout: probability with which an attention weight is dropped.
        implementation: ``reference``; ``fused``, one autograd function that keeps the weights only;
            ``sdpa``, torch's attention with the position term as its mask, without gradients or
            dropout. None: ``sdpa`` where neither gradients, nor dropout, nor ``received`` are
            wanted and :func:`sdpa_serves`, else ``fused``. So a pass draws the same dropout with and
            without gradients, as activation checkpointing needs.
        received: ``[B, S]``; the weights that each key receives, summed over heads and queries before
            dropout, are added to it in place, without gradient (not by ``sdpa``: it keeps none).

    Returns:
        ``[B, H, T, K]``.
    """
    refuse_unknown("implementation", implementation, Implementation)
    _check_distances(q, k, position_keys, mask, n_future)
    if not q.numel():
        # No rows or no queries: the result is as empty as they are.
        return q
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    tensors = _in_one_dtype(q, k, v, position_keys, content_bias, position_bias, position_scores)
    wants_gradient = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in tensors
    )
    if implementation is None:
        plain = not wants_gradient and not dropout and received is None
        implementation = "sdpa" if plain and sdpa_serves(q) else "fused"
    if implementation == "sdpa" and wants_gradient:
        raise MemspanError("sdpa is the path without gradients: use fused, or torch.no_grad()")
    if implementation == "sdpa" and dropout:
        raise MemspanError("sdpa would draw dropout in an order of its own: use fused or reference")
    if implementation == "sdpa" and received is not None:
        raise MemspanError("sdpa keeps no attention weights to sum: use fused or reference")
    with torch.autocast(q.device.type, enabled=False):
        q, k, v, position_keys, content_bias, position_bias, position_scores = tensors
        if implementation == "reference":
            weights = _weights(
                q,
                k,
                position_keys,
                content_bias,
                position_bias,
                position_scores,
                mask,
                n_future,
                scale,
            )
            if received is not None:
                received += weights.detach().sum((1, 2))
            return F.dropout(weights, dropout) @ v
        q, position_scores = _fold_biases(
            q, position_keys, content_bias, position_bias, position_scores
        )
        # Added to all heads, which is several times faster than filling by a mask.
        additive_mask = None
        if mask is not None:
            additive_mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
        n = _heads_at_once(q, k)
        parts = zip(
            q.split(n, 1),
            k.split(n, 1),
            v.split(n, 1),
            position_keys.split(n),
            position_scores.split(n),
            strict=True,
        )
        if implementation == "fused":
            outputs = [_fused(*part, additive_mask, scale, dropout, received) for part in parts]
        else:
            outputs = [_sdpa(*part, additive_mask, scale) for part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def sdpa_serves(like: Tensor) -> bool:
    """Whether torch's ``scaled_dot_product_attention`` is a fast choice for tensors such as ``like``.

    On a CPU with AVX-512 it was 6 to 15 times slower where float32 is multiplied with another precision
    than ``highest``, which makes products faster: then they are better made one by one.
    """
    if like.device.type != "cpu" or like.dtype != torch.float32 or torch.compiler.is_compiling():
        # A compiled graph holds for any setting: it may be slower, but not wrong.
        return True
    return float32_matmul_precision() == "highest"


def attention_weights(
    q: Tensor,
    k: Tensor,
    position_keys: Tensor,
    *,
    content_bias: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_scores: Tensor | None = None,
    mask: Tensor | None = None,
    n_future: int = 0,
    scale: float | None = None,
) -> Tensor:
    """The weights ``[B, H, T, S]`` that :func:`relative_attention` gives the values, for inspection.

    Arguments are the same. Each query's weights sum to 1, before any dropout.
    """
    _check_distances(q, k, position_keys, mask, n_future)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, _, position_keys, content_bias, position_bias, position_scores = _in_one_dtype(
        q, k, k, position_keys, content_bias, position_bias, position_scores
    )
    with torch.autocast(q.device.type, enabled=False):
        return _weights(
            q, k, position_keys, content_bias, position_bias, position_scores, mask, n_future, scale
        )


def _check_distances(
    q: Tensor, k: Tensor, position_keys: Tensor, mask: Tensor | None, n_future: int
) -> None:
    n_queries, n_keys = q.shape[2], k.shape[2]
    if mask is None and n_queries > 1 and n_future != n_queries - 1:
        raise ValueError(
            f"without a mask {n_queries} queries see up to {n_queries - 1} keys of their future: give "
            f"position keys for those distances with n_future={n_queries - 1}, or a causal mask"
        )
    if position_keys.shape[1] != n_future + n_keys:
        raise ValueError(
            f"{n_keys} keys and {n_future} future distances need as many position keys as both, "
            f"{n_future + n_keys}, not {position_keys.shape[1]}"
        )


def _in_one_dtype(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_keys: Tensor,
    content_bias: Tensor | None,
    position_bias: Tensor | None,
    position_scores: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """In that of the queries: under autocast projections are bfloat16 and biases float32."""

    def converted(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.to(q.dtype)

    biases = converted(content_bias), converted(position_bias), converted(position_scores)
    return q, k.to(q.dtype), v.to(q.dtype), position_keys.to(q.dtype), *biases


def _heads_at_once(q: Tensor, k: Tensor) -> int:
    """On a CPU, as many heads as keep the scores in its cache while they are worked on."""
    batch, n_heads, n_queries, _ = q.shape
    if q.device.type != "cpu":
        return n_heads
    one = batch * n_queries * k.shape[2] * q.element_size()
    return min(n_heads, max(1, CACHE_BYTES // one))


def _weights(
    q: Tensor,
    k: Tensor,
    position_keys: Tensor,
    content_bias: Tensor | None,
    position_bias: Tensor | None,
    position_scores: Tensor | None,
    mask: Tensor | None,
    n_future: int,
    scale: float,
) -> Tensor:
    """The equation at the top of this file, term by term: ``softmax_j(A)``, ``[B, H, T, S]``."""
    n_heads, n_distances, width = position_keys.shape
    n_queries, n_keys = q.shape[2], k.shape[2]
    zero = q.new_zeros(n_heads, width)
    u = (zero if content_bias is None else content_bias)[:, None]
    w = (zero if position_bias is None else position_bias)[:, None]
    s = q.new_zeros(n_heads, n_distances) if position_scores is None else position_scores

    content = (q + u) @ k.transpose(-1, -2)
    by_distance = (q + w) @ position_keys.transpose(-1, -2) + s[:, None]
    query = torch.arange(n_keys - n_queries, n_keys, device=q.device)
    row = n_future + query[:, None] - torch.arange(n_keys, device=q.device)
    # Rows below 0 are those of a future without position keys, which the mask excludes.
    row = row.clamp(min=0).expand(*by_distance.shape[:3], -1)
    position = by_distance.gather(-1, row)

    scores = scale * (content + position)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
    return scores.softmax(-1)


def _fold_biases(
    q: Tensor,
    position_keys: Tensor,
    content_bias: Tensor | None,
    position_bias: Tensor | None,
    position_scores: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Rewrite the scores with one query: ``(q+u).k + (q+u).R + [(v-u).R + S]``."""
    if position_scores is None:
        position_scores = position_keys.new_zeros(position_keys.shape[:2])
    shift = position_bias
    if content_bias is not None:
        q = q + content_bias[:, None]
        shift = -content_bias if shift is None else shift - content_bias
    if shift is not None:
        position_scores = position_scores + (position_keys @ shift[:, :, None]).squeeze(-1)
    return q, position_scores


def _farthest_first(position_keys: Tensor, position_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Distances ``[dummy, S-1, ..., -F]``: the extra row that makes the relative shift a view."""
    keys = F.pad(position_keys.flip(1), (0, 0, 1, 0))
    return keys, F.pad(position_scores.flip(1), (1, 0))


def _shift(x: Tensor, n_queries: int, n_keys: int) -> Tensor:
    """The relative shift ``[N, T * (S+F+1)] -> [N, T, S]`` without a copy.

    Column ``c`` of ``x[N, T, S+F+1]`` is the distance ``S - c``. Dropping the first ``T`` numbers and
    reading rows of ``S+F`` puts ``x[i, j + T - i]``, the distance ``S - T + i - j``, at ``[i, j]``.
    Entries more than ``F`` in the future come from the next row; the mask excludes them.
    """
    return x[:, n_queries:].unflatten(-1, (n_queries, -1))[..., :n_keys]


def _position_term(heads: Tensor, keys: Tensor, scores: Tensor) -> Tensor:
    """``q . R + S_d`` per head: ``[H, B*T, K] -> [H, B*T, S+F+1]``."""
    return torch.bmm(heads, keys.transpose(1, 2)).add_(scores[:, None])


class _FusedRelativeAttention(torch.autograd.Function):
    """Head-major throughout, so that the position term is one product per head, not per row.

    Saves the weights and the output; the scores' gradient is written where the backward of the
    relative shift needs it. With ``D = rowsum(dO * O)``: ``dA = P * (dP - D)``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keys: Tensor,
        scores: Tensor,
        additive_mask: Tensor | None,
        scale: float,
        dropout: float,
        received: Tensor | None,
    ) -> Tensor:
        n_heads, batch, n_queries, width = q.shape
        length = k.shape[2]
        q, k, v = (t.reshape(n_heads * batch, -1, width).contiguous() for t in (q, k, v))

        x = _position_term(q.view(n_heads, -1, width), keys, scores)
        shifted = _shift(x.view(n_heads * batch, -1), n_queries, length)
        a = torch.baddbmm(shifted, q, k.transpose(1, 2), beta=scale, alpha=scale)
        if additive_mask is not None:
            a.view(n_heads, batch, n_queries, length).add_(additive_mask)
        weights = torch.softmax(a, -1)
        if received is not None:
            received += weights.view(n_heads, batch, n_queries, length).sum((0, 2))
        kept = None
        if dropout > 0:
            kept = torch.empty_like(weights, dtype=torch.bool).bernoulli_(1 - dropout)
            out = torch.bmm(weights * kept, v).div_(1 - dropout)
        else:
            out = torch.bmm(weights, v)
        ctx.save_for_backward(q, k, v, keys, weights, kept, out)
        ctx.shape = (n_heads, batch, n_queries, length, width)
        ctx.scale, ctx.dropout = scale, dropout
        return out.view(n_heads, batch, n_queries, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, keys, weights, kept, out = ctx.saved_tensors
        n_heads, batch, n_queries, length, width = ctx.shape
        grad = grad.reshape(n_heads * batch, n_queries, width)
        row = (grad * out).sum(-1, keepdim=True)
        if kept is None:
            d_v = torch.bmm(weights.transpose(1, 2), grad)
            d_weights = torch.baddbmm(row, grad, v.transpose(1, 2), beta=-1)
        else:
            d_v = torch.bmm((weights * kept).transpose(1, 2), grad).div_(1 - ctx.dropout)
            d_weights = torch.bmm(grad, v.transpose(1, 2)).div_(1 - ctx.dropout)
            d_weights.mul_(kept).sub_(row)
        # dA is written through the shift's view: the buffer is then the position term's gradient.
        n_columns = keys.shape[1]
        d_x = grad.new_empty(n_heads * batch, n_queries * n_columns)
        # What the view leaves out: the first T entries, and with future distances the rows' ends.
        d_x[:, : n_queries if n_columns == length + 1 else None] = 0
        d_a = _shift(d_x, n_queries, length)
        if torch.compiler.is_compiling():
            # The compiler takes no view as out=.
            d_a.copy_(weights * d_weights)
        else:
            torch.mul(weights, d_weights, out=d_a)
        d_k = torch.bmm(d_a.transpose(1, 2), q).mul_(ctx.scale)
        d_q = torch.bmm(d_a, k).view(n_heads, -1, width)
        d_x = d_x.view(n_heads, batch * n_queries, n_columns)
        d_q = torch.baddbmm(d_q, d_x, keys, beta=ctx.scale, alpha=ctx.scale)
        d_keys = d_scores = None
        if ctx.needs_input_grad[3]:
            d_keys = torch.bmm(d_x.transpose(1, 2), q.view(n_heads, -1, width)).mul_(ctx.scale)
        if ctx.needs_input_grad[4]:
            d_scores = d_x.sum(1).mul_(ctx.scale)
        heads = (n_heads, batch, -1, width)
        d_q, d_k, d_v = d_q.view(heads), d_k.view(heads), d_v.view(heads)
        return d_q, d_k, d_v, d_keys, d_scores, None, None, None, None


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_keys: Tensor,
    position_scores: Tensor,
    additive_mask: Tensor | None,
    scale: float,
    dropout: float,
    received: Tensor | None,
) -> Tensor:
    keys, scores = _farthest_first(position_keys, position_scores)
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    apply: Any = _FusedRelativeAttention.apply
    out = apply(q, k, v, keys, scores, additive_mask, scale, dropout, received)
    return out.transpose(0, 1)


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_keys: Tensor,
    position_scores: Tensor,
    additive_mask: Tensor | None,
    scale: float,
) -> Tensor:
    batch, n_heads, n_queries, width = q.shape
    heads = q.transpose(0, 1).reshape(n_heads, batch * n_queries, width) * scale
    keys, scores = _farthest_first(position_keys, position_scores * scale)
    x = _position_term(heads, keys, scores)
    position = _shift(x.view(n_heads * batch, -1), n_queries, k.shape[2])
    position = position.unflatten(0, (n_heads, batch))
    if additive_mask is not None:
        position.add_(additive_mask)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=position.transpose(0, 1), scale=scale)


def attend_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_keys: Tensor,
    position_scores: Tensor,
    mask: Tensor | None,
    scale: float,
) -> Tensor:
    """:func:`relative_attention` for one query per row, as decoding needs it: no shift, few calls.

    Args:
        q: queries with ``u`` added, ``[B, H, K]``.
        k: keys ``[B, H, S, K]``; likewise ``v``.
        position_keys: ``R`` with the farthest distance first, ``[H, S, K]``.
        position_scores: ``(v - u) . R_d + S_d`` in the same order, ``[H, S]``.
        mask: bool ``[B, S]``, true where a key may be seen (None: everywhere).

    Returns:
        ``[B, H, K]``.
    """
    batch, n_heads, width = q.shape
    position = torch.baddbmm(
        position_scores[:, None], q.transpose(0, 1), position_keys.transpose(1, 2)
    )
    position = position.transpose(0, 1).reshape(batch * n_heads, 1, -1)
    keys, values = k.flatten(0, 1), v.flatten(0, 1)
    q = q.reshape(batch * n_heads, 1, width)
    scores = torch.baddbmm(position, q, keys.transpose(1, 2), beta=scale, alpha=scale)
    if mask is not None:
        scores.view(batch, n_heads, -1).masked_fill_(~mask[:, None], float("-inf"))
    return torch.bmm(scores.softmax(-1), values).view(batch, n_heads, width)
