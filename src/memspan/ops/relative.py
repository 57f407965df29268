"""Attention with relative positions (Dai et al. 2019, section 3.3): the reference and its fast paths.

For query ``i`` of ``T`` and key ``j`` of ``S``, with the keys ordered ``[memory | segment]`` so that
query ``i`` is at key ``S - T + i`` and the distance is ``d = S - T + i - j``::

    A_ij = ( (q_i + u) . k_j  +  (q_i + v) . R_d  +  S_d ) / sqrt(K)      attention(i) = softmax_j(A) V

``R`` is the projected sinusoid of the distance or a learned table, ``u`` and ``v`` are the paper's
global biases, ``S_d`` is the learned variant's bias per distance. Attention is causal, ``d >= 0``,
unless the positions have distances in the future, as Conformers do (Gulati et al. 2020, section 2.1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memspan.errors import MemspanError
from memspan.ops.first_derivatives import apply, first_derivatives_only, refuse_transforms
from memspan.ops.implementations import Implementation, check_shape, check_together, choose
from memspan.ops.limits import Limits

CACHE_BYTES = 2 << 20
"""Bytes of scores that are computed at once on a CPU; half or twice as many cost little."""


class Positions(NamedTuple):
    """Tensors that scores depend on besides queries and keys; symbols as in the equation."""

    keys: Tensor
    """``R``, ``[H, S + F, K]`` for the distances ``-F .. S-1``: row ``r`` belongs to ``r - F``.
    Causal attention has ``F = 0``; ``F`` is at most ``T - 1``."""
    scores: Tensor | None = None
    """``S_d``, ``[H, S + F]``."""
    content_bias: Tensor | None = None
    """``u``, ``[H, K]``."""
    position_bias: Tensor | None = None
    """``v``, ``[H, K]``."""

    def to(self, dtype: torch.dtype) -> Positions:
        """In this type."""
        if all(t is None or t.dtype == dtype for t in self):
            return self
        scores, u, v = (t if t is None else t.to(dtype) for t in self[1:])
        return Positions(self.keys.to(dtype), scores, u, v)

    def future(self, n_keys: int) -> int:
        """``F``, the distances in the future, where there are so many keys."""
        return self.keys.shape[1] - n_keys

    def check(self, q: Tensor, k: Tensor, mask: Tensor | Limits | None) -> None:
        """Raise :class:`MemspanError` unless they go with these queries, keys and mask."""
        keys, scores, u, w = self
        named = zip(self._fields, self, strict=True)
        check_together(False, q=q, k=k, **{f"positions.{name}": tensor for name, tensor in named})
        if q.dim() != 4 or k.dim() != 4 or q.shape != (*k.shape[:2], q.shape[2], k.shape[3]):
            raise MemspanError(
                f"queries and keys do not fit together: {[*q.shape]} and {[*k.shape]}; pass "
                "[B, H, T, K] and [B, H, S, K]"
            )
        batch, n_heads, n_queries, width = q.shape
        n_keys = k.shape[2]
        if n_keys < n_queries:
            raise MemspanError(
                f"{n_queries} queries need as many keys or more, not {n_keys}: keys are those of "
                "memory and of the segment itself"
            )
        future = keys.shape[1] - n_keys if keys.dim() == 3 else 0
        if not 0 <= future < max(n_queries, 1):
            future = 0
        check_shape("positions.keys", keys, "[H, S, K]", n_heads, n_keys + future, width)
        check_shape("positions.scores", scores, "[H, S]", n_heads, n_keys + future)
        if mask is None and n_queries > 1 and future < n_queries - 1:
            raise MemspanError(
                f"without a mask {n_queries} queries see up to {n_queries - 1} keys of their "
                "future, which have no position keys: pass a causal mask"
            )
        check_shape("positions.content_bias", u, "[H, K]", n_heads, width)
        check_shape("positions.position_bias", w, "[H, K]", n_heads, width)
        if isinstance(mask, Limits):
            for name, limit in zip(mask._fields, mask, strict=True):
                if (
                    limit.dtype not in (torch.int32, torch.int64)
                    or limit.shape not in ((1, n_queries), (batch, n_queries))
                    or limit.device != q.device
                ):
                    raise MemspanError(
                        f"mask.{name} must be int32 or int64 [1 or {batch}, {n_queries}] on "
                        f"{q.device}, not {str(limit.dtype).removeprefix('torch.')} "
                        f"{[*limit.shape]} on {limit.device}"
                    )
        elif mask is not None and not (
            mask.dtype == torch.bool
            and mask.shape in ((1, n_queries, n_keys), (batch, n_queries, n_keys))
            and mask.device == q.device
        ):
            raise MemspanError(
                f"the mask must be bool [1 or {batch}, {n_queries}, {n_keys}] on {q.device}, not "
                f"{str(mask.dtype).removeprefix('torch.')} {[*mask.shape]} on {mask.device}"
            )


class _Inputs(NamedTuple):
    """Arguments of :func:`relative_attention`, in the dtype of the queries."""

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Positions
    mask: Tensor | Limits | None
    dropout: float
    received: Tensor | None

    def dense_mask(self) -> Tensor | None:
        """The mask as a tensor."""
        return _dense(self.mask, self.k.shape[2])

    def requires_grad(self) -> bool:
        tensors = (self.q, self.k, self.v, *self.positions)
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def relative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Positions,
    *,
    mask: Tensor | Limits | None = None,
    dropout: float = 0.0,
    implementation: str | None = None,
    received: Tensor | None = None,
) -> Tensor:
    """Attend by content and distance (Dai et al. 2019, section 3.3).

    Args:
        q: queries ``[B, H, T, K]``.
        k: keys ``[B, H, S, K]``, ``S >= T``, oldest first.
        v: values ``[B, H, S, V]``.
        positions: for distances up to ``S - 1``, and to ``-F`` where queries see their future.
        mask: bool ``[B or 1, T, S]``, true where a query may attend: not to keys more than ``F`` in its
            future, and every query to something. Or :class:`~memspan.ops.limits.Limits`, which say the
            same of one run of keys in two integers. None: every query attends to every key, which a
            single one does, and several with ``F = T - 1``.
        dropout: probability with which an attention weight is dropped.
        implementation: a name from :data:`IMPLEMENTATIONS`; None: the first that is fast and can run.
            A pass draws the same dropout with and without gradients, as activation checkpointing
            needs.
        received: ``[B, S]``; the weights that each key receives, summed over heads and queries before
            dropout, are added to it in place, without gradient.

    Returns:
        ``[B, H, T, V]``.

    Raises:
        MemspanError: shapes or devices do not go together, or the positions are not those of ``S``
            keys; the implementation does not exist or cannot run.
    """
    positions.check(q, k, mask)
    check_together(False, q=q, v=v)
    check_shape("v", v, "[B, H, S, V]", *k.shape[:3], *v.shape[-1:])
    check_shape("received", received, "[B, S]", k.shape[0], k.shape[2])
    # Under autocast, projections are bfloat16 and biases float32.
    k = k.to(q.dtype)
    v = v.to(q.dtype)
    positions = positions.to(q.dtype)
    inputs = _Inputs(q, k, v, positions, mask, dropout, received)
    run = choose(IMPLEMENTATIONS, implementation, inputs)
    if not q.numel():
        # No rows or no queries: the result is as empty as they are.
        return q[..., :1].expand(*q.shape[:3], v.shape[3])
    with torch.autocast(q.device.type, enabled=False):
        return run(inputs)


def attention_weights(
    q: Tensor, k: Tensor, positions: Positions, *, mask: Tensor | Limits | None = None
) -> Tensor:
    """The weights ``[B, H, T, S]`` that :func:`relative_attention` gives the values, for inspection.

    Arguments are the same. Each query's weights sum to 1, before any dropout.
    """
    positions.check(q, k, mask)
    with torch.autocast(q.device.type, enabled=False):
        return _weights(q, k.to(q.dtype), positions.to(q.dtype), _dense(mask, k.shape[2]))


def _dense(mask: Tensor | Limits | None, n_keys: int) -> Tensor | None:
    """The mask as a tensor."""
    return mask.mask(n_keys) if isinstance(mask, Limits) else mask


# ----- The reference


def _reference(inputs: _Inputs) -> Tensor:
    """The equation in plain autograd."""
    weights = _weights(inputs.q, inputs.k, inputs.positions, inputs.dense_mask())
    if inputs.received is not None:
        inputs.received.add_(weights.detach().sum((1, 2)))
    return F.dropout(weights, inputs.dropout) @ inputs.v


def _weights(q: Tensor, k: Tensor, positions: Positions, mask: Tensor | None) -> Tensor:
    """``softmax_j(A)``, term by term: ``[B, H, T, S]``."""
    n_heads, n_distances, width = positions.keys.shape
    n_queries = q.shape[2]
    n_keys = k.shape[2]
    u = positions.content_bias
    w = positions.position_bias
    s = positions.scores
    zero = q.new_zeros(n_heads, width)
    u, w = (zero if bias is None else bias for bias in (u, w))
    s = q.new_zeros(n_heads, n_distances) if s is None else s

    content = (q + u[:, None]) @ k.transpose(-1, -2)
    by_distance = (q + w[:, None]) @ positions.keys.transpose(-1, -2) + s[:, None]
    query = torch.arange(n_keys - n_queries, n_keys, device=q.device)
    row = query[:, None] - torch.arange(n_keys, device=q.device) + positions.future(n_keys)
    # Rows below 0 belong to keys farther in the future, which the mask excludes.
    row = row.clamp(min=0).expand(*by_distance.shape[:3], -1)
    position = by_distance.gather(-1, row)

    scores = width**-0.5 * (content + position)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
    return scores.softmax(-1)


# ----- What the fast paths share


def _by_heads(inputs: _Inputs, run: Callable[..., Tensor]) -> Tensor:
    """``run(q, k, v, position_keys, position_scores, additive_mask)``, on a CPU for as many heads at a
    time as keep their scores in its cache."""
    q, scores = _fold_biases(inputs.q, inputs.positions)
    additive_mask = None
    mask = inputs.dense_mask()
    if mask is not None:
        # Added to all heads, which is several times faster than filling by a mask.
        additive_mask = torch.zeros_like(mask, dtype=q.dtype)
        additive_mask.masked_fill_(~mask, -torch.inf)
    batch, n, n_queries, _ = q.shape
    one_head = batch * n_queries * inputs.k.shape[2] * q.element_size()
    # Exports may leave sizes free.
    if q.device.type == "cpu" and isinstance(one_head, int):
        n = min(n, max(1, CACHE_BYTES // one_head))
    parts = zip(
        *(x.split(n, 1) for x in (q, inputs.k, inputs.v)),
        *(x.split(n) for x in (inputs.positions.keys, scores)),
        strict=True,
    )
    outputs = [run(*part, additive_mask) for part in parts]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def _fold_biases(q: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
    """Rewrite the scores with one query: ``(q+u).k + (q+u).R + [(v-u).R + S]``."""
    scores = positions.scores
    shift = positions.position_bias
    if positions.content_bias is not None:
        q = q + positions.content_bias[:, None]
        shift = -positions.content_bias if shift is None else shift - positions.content_bias
    if shift is not None:
        by_distance = (positions.keys @ shift[:, :, None]).squeeze(-1)
        scores = by_distance if scores is None else scores + by_distance
    return q, positions.keys.new_zeros(positions.keys.shape[:2]) if scores is None else scores


def _farthest_first(position_keys: Tensor, position_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Distances ``[dummy, S-1, ..., -F]``: the extra row that makes the relative shift a view."""
    keys = F.pad(position_keys.flip(1), (0, 0, 1, 0))
    return keys, F.pad(position_scores.flip(1), (1, 0))


def _shift(x: Tensor, n_queries: int, n_keys: int) -> Tensor:
    """The paper's relative shift ``[N, T * (S+F+1)] -> [N, T, S]`` (appendix B), without a copy.

    Column ``c`` of ``x[N, T, S+F+1]`` is the distance ``S - c``. Dropping the first ``T`` numbers and
    reading rows of ``S + F`` puts ``x[i, j + T - i]``, the distance ``S - T + i - j``, at ``[i, j]``.
    Keys more than ``F`` in the future get what comes from the next row; the mask excludes them.
    """
    return x[:, n_queries:].unflatten(-1, (n_queries, -1))[..., :n_keys]


def _position_term(heads: Tensor, keys: Tensor, scores: Tensor) -> Tensor:
    """``q . R + S_d`` per head: ``[H, B*T, K] -> [H, B*T, S+F+1]``."""
    return torch.bmm(heads, keys.transpose(1, 2)).add_(scores[:, None])


# ----- The fast paths


class _FusedRelativeAttention(torch.autograd.Function):
    """Heads before rows throughout, so that the position term is one product per head, not per row.

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
        dropout: float,
        received: Tensor | None,
    ) -> Tensor:
        n_heads, batch, n_queries, width = q.shape
        scale = width**-0.5
        length, value_width = v.shape[2:]
        q, k, v = (t.contiguous() for t in (q, k, v))
        # Flattened twice from the same tensor: exports with a free number of rows refuse a view of
        # a view here.
        x = _position_term(q.flatten(1, 2), keys, scores)
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        shifted = _shift(x.view(n_heads * batch, -1), n_queries, length)
        a = torch.baddbmm(shifted, q, k.transpose(1, 2), beta=scale, alpha=scale)
        if additive_mask is not None:
            a.view(n_heads, batch, n_queries, length).add_(additive_mask)
        weights = torch.softmax(a, -1)
        if received is not None:
            received += weights.view(n_heads, batch, n_queries, length).sum((0, 2))
        not_dropped = None
        if dropout > 0:
            not_dropped = torch.empty_like(weights, dtype=torch.bool).bernoulli_(1 - dropout)
            out = torch.bmm(weights * not_dropped, v).div_(1 - dropout)
        else:
            out = torch.bmm(weights, v)
        ctx.save_for_backward(q, k, v, keys, weights, not_dropped, out)
        ctx.shape = (n_heads, batch, n_queries, length, width)
        ctx.dropout = dropout
        return out.view(n_heads, batch, n_queries, value_width)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, keys, weights, not_dropped, out = ctx.saved_tensors
        n_heads, batch, n_queries, length, width = ctx.shape
        scale = width**-0.5
        grad = grad.reshape(out.shape)
        row = (grad * out).sum(-1, keepdim=True)
        if not_dropped is None:
            d_v = torch.bmm(weights.transpose(1, 2), grad)
            d_weights = torch.baddbmm(row, grad, v.transpose(1, 2), beta=-1)
        else:
            d_v = torch.bmm((weights * not_dropped).transpose(1, 2), grad).div_(1 - ctx.dropout)
            d_weights = torch.bmm(grad, v.transpose(1, 2)).div_(1 - ctx.dropout)
            d_weights.mul_(not_dropped).sub_(row)
        # dA is written through the shift's view: the buffer is then the position term's gradient.
        n_columns = keys.shape[1]
        d_x = grad.new_empty(n_heads * batch, n_queries * n_columns)
        # Outside the view.
        d_x[:, :n_queries] = 0
        if n_columns > length + 1:
            _shift(d_x, n_queries, n_columns)[..., length:] = 0
        d_a = _shift(d_x, n_queries, length)
        if torch.compiler.is_compiling():
            # torch.compile accepts no view as out=.
            d_a.copy_(weights * d_weights)
        else:
            torch.mul(weights, d_weights, out=d_a)
        d_k = torch.bmm(d_a.transpose(1, 2), q).mul_(scale)
        d_q = torch.bmm(d_a, k).view(n_heads, -1, width)
        d_x = d_x.view(n_heads, batch * n_queries, n_columns)
        d_q = torch.baddbmm(d_q, d_x, keys, beta=scale, alpha=scale)
        d_keys = d_scores = None
        if ctx.needs_input_grad[3]:
            d_keys = torch.bmm(d_x.transpose(1, 2), q.view(n_heads, -1, width)).mul_(scale)
        if ctx.needs_input_grad[4]:
            d_scores = d_x.sum(1).mul_(scale)
        d_q, d_k, d_v = (
            d.view(n_heads, batch, *d.shape[1:]) for d in (d_q.view(q.shape), d_k, d_v)
        )
        return d_q, d_k, d_v, d_keys, d_scores, None, None, None


def _fused(inputs: _Inputs) -> Tensor:
    def run(
        q: Tensor, k: Tensor, v: Tensor, keys: Tensor, scores: Tensor, additive_mask: Tensor | None
    ) -> Tensor:
        keys, scores = _farthest_first(keys, scores)
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        given = (q, k, v, keys, scores, additive_mask, inputs.dropout, inputs.received)
        out: Tensor = apply(_FusedRelativeAttention, *given)
        return out.transpose(0, 1)

    return _by_heads(inputs, run)


def _sdpa(inputs: _Inputs) -> Tensor:
    refuse_transforms(inputs.q, inputs.k, inputs.v, *inputs.positions)
    return _by_heads(inputs, _sdpa_of_heads)


def _sdpa_of_heads(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, scores: Tensor, additive_mask: Tensor | None
) -> Tensor:
    batch, n_heads, n_queries, width = q.shape
    scale = width**-0.5
    heads = q.transpose(0, 1).reshape(n_heads, batch * n_queries, width) * scale
    keys, scores = _farthest_first(keys, scores * scale)
    x = _position_term(heads, keys, scores)
    position = _shift(x.view(n_heads * batch, -1), n_queries, k.shape[2])
    position = position.unflatten(0, (n_heads, batch))
    if additive_mask is not None:
        position.add_(additive_mask)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=position.transpose(0, 1), scale=scale)


def _sdpa_obstacle(inputs: _Inputs) -> str | None:
    if inputs.requires_grad():
        return "has no gradients: use fused, or torch.no_grad()"
    if inputs.dropout:
        return "would draw dropout in an order of its own: use fused or reference"
    if inputs.received is not None:
        return "has no attention weights to sum: use fused or reference"
    return None


def sdpa_is_fast(like: Tensor) -> bool:
    """True if torch's ``scaled_dot_product_attention`` is a fast choice for tensors such as ``like``.

    On a CPU with AVX-512 it was 6 to 15 times slower at any float32 matmul precision but ``highest``,
    which speeds up separate products.
    """
    if like.device.type != "cpu" or like.dtype != torch.float32 or torch.compiler.is_compiling():
        # A graph of torch.compile is used under any setting: it may be slower, but not wrong.
        return True
    from memspan.precision import float32_matmul_precision

    return float32_matmul_precision() == "highest"


def _triton(inputs: _Inputs) -> Tensor:
    from memspan.ops.relative_kernel import launch

    q, scores = _fold_biases(inputs.q, inputs.positions)
    if inputs.mask is None:
        first = torch.zeros(1, q.shape[2], dtype=torch.int32, device=q.device)
        limits = Limits(first, first + (inputs.k.shape[2] - 1))
    else:
        mask = inputs.mask
        limits = mask if isinstance(mask, Limits) else Limits.of(mask)
    return launch.attend(q, inputs.k, inputs.v, inputs.positions.keys, scores, limits)


def _triton_obstacle(inputs: _Inputs) -> str | None:
    if inputs.dropout:
        return "has no dropout: use fused"
    if inputs.received is not None:
        return "has no attention weights to sum: use fused or reference"
    from memspan.ops import relative_kernel

    return relative_kernel.obstacle(inputs.q, inputs.v, inputs.mask)


IMPLEMENTATIONS: dict[str, Implementation[_Inputs, Tensor]] = {
    "sdpa": Implementation(_sdpa, _sdpa_obstacle, lambda inputs: sdpa_is_fast(inputs.q)),
    "triton": Implementation(_triton, _triton_obstacle, lambda inputs: False),
    "fused": Implementation(_fused),
    "reference": Implementation(_reference),
}
"""By preference. ``sdpa``: torch's attention with the position term as its mask, without gradients,
dropout or ``received``. ``triton``: programs for GPUs, only by name: they have not been run on one.
``fused``: one autograd function that saves only the weights and the output.
``reference``: plain autograd, for double backward and ``torch.func``."""


def attend_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_keys: Tensor,
    position_scores: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """:func:`relative_attention` for one query per row, for decoding: no shift and few calls.

    Args:
        q: queries with ``u`` added, ``[B, H, K]``.
        k: keys ``[B, H, S, K]``; ``v``: values in the same shape.
        position_keys: ``R`` with the farthest distance first, ``[H, S, K]``.
        position_scores: ``(v - u) . R_d + S_d`` in the same order, ``[H, S]``.
        mask: bool ``[B, S]``, true where the query may attend (None: everywhere).

    Returns:
        ``[B, H, K]``.
    """
    batch, n_heads, width = q.shape
    scale = width**-0.5
    position = torch.baddbmm(
        position_scores[:, None], q.transpose(0, 1), position_keys.transpose(1, 2)
    )
    position = position.transpose(0, 1).reshape(batch * n_heads, 1, k.shape[2])
    keys = k.flatten(0, 1)
    values = v.flatten(0, 1)
    q = q.reshape(batch * n_heads, 1, width)
    scores = torch.baddbmm(position, q, keys.transpose(1, 2), beta=scale, alpha=scale)
    if mask is not None:
        scores.view(batch, n_heads, k.shape[2]).masked_fill_(~mask[:, None], float("-inf"))
    return torch.bmm(scores.softmax(-1), values).view(batch, n_heads, width)
