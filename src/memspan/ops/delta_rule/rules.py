"""Fast weights that are written and read with every token (Schlag et al. 2021, section 4).

Per head a matrix ``W [F, V]`` (the paper's, transposed), features ``q, k [F]`` and a value ``v [V]``::

    delta rule      W' = W + beta k (x) (v - k W)        y = q W'            (eq. 24 and 25)
    sum             W' = W + k (x) v                     y = q W'            (eq. 4 and 5)
    outer product   W' = f(W + k (x) v), f tanh or none  y = q W'            (Schmidhuber 1991)

Each rule has a loop over tokens to read beside the paper. The first two also have a form that works
on chunks of tokens (Yang et al. 2024, arXiv 2406.06484), with a derivation in
docs/fast_weights.md: matrix products and one triangular solve, cost linear in the length. On a CPU
with a C compiler the loop over tokens runs in C and is faster still.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from memspan.errors import MemspanError, refuse_unknown
from memspan.ops.delta_rule import compiled as delta_rule_loop
from memspan.ops.delta_rule.feature_maps import DPFP, FeatureMap, in_plain_autograd

CHUNK = 32
"""Tokens that are worked on at once."""
CACHE_BYTES = 1 << 20
"""Memories of consecutive chunks that are worked on at once on a CPU."""
RECOMPUTED_CHUNKS = 16
"""With ``recompute``, chunks between two memories that are kept for the backward pass."""

Implementation = Literal["reference", "chunked", "compiled"]


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    weights: Tensor,
    *,
    feature_map: FeatureMap | None = None,
    chunk_size: int = CHUNK,
    recompute: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Tensor, Tensor]:
    """Read ``T`` tokens with the delta rule: what is stored under a key is replaced, not added to.

    Args:
        q: queries ``[B, H, T, K]``; features ``[B, H, T, F]`` where there is no ``feature_map``.
        k: keys, as the queries.
        v: values ``[B, H, T, V]``.
        beta: how much of the old value is replaced, ``[B, H, T]``, in ``[0, 1]``.
        weights: the memory before the first token, ``[B, H, F, V]``.
        feature_map: ``[..., K] -> [..., F]``, applied to queries and keys. Given here it is applied
            after the tensors are laid out in chunks, which saves a copy of the wider features; and
            of a :class:`~memspan.ops.feature_maps.DPFP` the compiled loop skips what is zero.
        chunk_size: tokens that are worked on at once; nothing to the loops.
        recompute: save one memory every 16 chunks (the compiled loop: every 256 tokens, not 64) for
            the backward pass, and compute the rest anew there. Chunked it takes a third more time.
        implementation: ``reference``, a loop over tokens in plain autograd; ``chunked``;
            ``compiled``, the loop in C, on a CPU, in float32 or float64, with a C compiler. None:
            ``compiled`` where it can run, else ``chunked``.

    Returns:
        ``y [B, H, T, V]`` and the memory after the last token, ``[B, H, F, V]``.

    Raises:
        MemspanError: shapes do not fit; the compiled loop is asked for and cannot run.
    """
    _check(q, k, v, weights, feature_map, chunk_size, beta)
    if _compiles((q, k, v, beta, weights), implementation):
        return _compiled(q, k, v, beta, weights, feature_map, recompute)
    feature_map = feature_map or _identity
    if implementation == "reference":
        feature_map = in_plain_autograd(feature_map)
        return _delta_reference(feature_map(q), feature_map(k), v, beta, weights)

    def run(
        weights: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        apply: Any = _ChunkedDeltaRule.apply
        return apply(feature_map(q), feature_map(k), v, beta, weights)

    return _in_chunks(run, (q, k, v, beta.unsqueeze(-1)), weights, chunk_size, recompute)


def sum_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    *,
    feature_map: FeatureMap | None = None,
    chunk_size: int = CHUNK,
    recompute: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Tensor, Tensor]:
    """Read ``T`` tokens with the sum rule: linear attention without its denominator.

    The denominator ``z . q``, with ``z' = z + k``, is the same recurrence with values of one: append
    a column of ones to ``v``, and ``z`` as a column to ``weights``.

    Arguments and results are those of :func:`delta_rule`, without ``beta``.
    """
    _check(q, k, v, weights, feature_map, chunk_size)
    if _compiles((q, k, v, weights), implementation):
        return _compiled(q, k, v, None, weights, feature_map, recompute)
    feature_map = feature_map or _identity
    if implementation == "reference":
        feature_map = in_plain_autograd(feature_map)
        return _sum_reference(feature_map(q), feature_map(k), v, weights)

    def run(weights: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return _chunked_sum_rule(feature_map(q), feature_map(k), v, weights)

    return _in_chunks(run, (q, k, v), weights, chunk_size, recompute)


def outer_product_rule(
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor, *, activation: Literal["tanh", "identity"]
) -> tuple[Tensor, Tensor]:
    """Read ``T`` tokens with the rule of 1991, ``W' = f(W + k (x) v)``, by a loop over tokens.

    The non-linearity between tokens leaves no parallel form. Shapes as in :func:`delta_rule`.
    """
    _check(q, k, v, weights)
    squash = torch.tanh if activation == "tanh" else _identity
    outputs = []
    for q_t, k_t, v_t in zip(q.unbind(2), k.unbind(2), v.unbind(2), strict=True):
        weights = squash(weights + k_t.unsqueeze(-1) * v_t.unsqueeze(-2))
        outputs.append(_read(q_t, weights))
    return torch.stack(outputs, 2), weights


# ----- The recurrences, token by token


def _delta_reference(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    outputs = []
    tokens = zip(q.unbind(2), k.unbind(2), v.unbind(2), beta.unbind(2), strict=True)
    for q_t, k_t, v_t, beta_t in tokens:
        change = beta_t.unsqueeze(-1) * (v_t - _read(k_t, weights))
        weights = weights + k_t.unsqueeze(-1) * change.unsqueeze(-2)
        outputs.append(_read(q_t, weights))
    return torch.stack(outputs, 2), weights


def _sum_reference(q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    outputs = []
    for q_t, k_t, v_t in zip(q.unbind(2), k.unbind(2), v.unbind(2), strict=True):
        weights = weights + k_t.unsqueeze(-1) * v_t.unsqueeze(-2)
        outputs.append(_read(q_t, weights))
    return torch.stack(outputs, 2), weights


def _read(q: Tensor, weights: Tensor) -> Tensor:
    """``q W``: ``[B, H, F], [B, H, F, V] -> [B, H, V]``."""
    return (q.unsqueeze(-2) @ weights).squeeze(-2)


# ----- The same in C


def _compiles(tensors: tuple[Tensor, ...], wanted: Implementation | None) -> bool:
    """Whether the loop in C is to serve."""
    refuse_unknown("implementation", wanted, Implementation)
    if wanted not in (None, "compiled") or torch.compiler.is_compiling():
        return False
    one_type = len({t.dtype for t in tensors}) == 1
    can = one_type and all(delta_rule_loop.available(t) for t in tensors)
    if wanted and not can:
        raise MemspanError(
            "the compiled implementation needs a CPU, tensors all of float32 or all of float64, a C "
            "compiler (cc), and MEMSPAN_COMPILE other than 0: use chunked"
        )
    return can


def _compiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    weights: Tensor,
    feature_map: FeatureMap | None,
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    dpfp = feature_map if isinstance(feature_map, DPFP) else None
    if feature_map and not dpfp:
        q, k = feature_map(q), feature_map(k)
    apply: Any = delta_rule_loop.CompiledRule.apply
    return apply(q, k, v, beta, weights, dpfp, recompute)


# ----- The same by chunks. Tensors are [N, M, G, ...]: N chunks of G tokens, M = B * H heads


def _in_chunks(
    run: Callable[..., tuple[Tensor, Tensor]],
    tensors: tuple[Tensor, ...],
    weights: Tensor,
    chunk_size: int,
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    """Lay ``[B, H, T, ...]`` out in chunks, run over them, and lay the outputs back.

    What is left after the last whole chunk is a shorter chunk of its own: nothing is padded.
    """
    batch, n_heads, length = tensors[0].shape[:3]
    size = min(chunk_size, length)
    whole = length - length % size
    block = size * _chunks_at_once(weights, recompute)
    lengths = [min(block, whole - start) for start in range(0, whole, block)]
    lengths += [length - whole] if whole < length else []
    memory, outputs = weights.flatten(0, 1), []
    # Split once: the backward of slices would write a gradient of the whole length for each.
    for parts in zip(*(t.split(lengths, 2) for t in tensors), strict=True):
        laid_out = [_to_chunks(t, min(size, t.shape[2])) for t in parts]
        if recompute:
            y, memory = checkpoint(  # type: ignore[misc]
                run, memory, *laid_out, use_reentrant=False, preserve_rng_state=False
            )
        else:
            y, memory = run(memory, *laid_out)
        outputs.append(_from_chunks(y, batch))
    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
    return y.transpose(1, 2), memory.unflatten(0, (batch, n_heads))


def _chunks_at_once(weights: Tensor, recompute: bool) -> int:
    """On a CPU, as many chunks as keep what is worked on in its cache; elsewhere all."""
    if recompute:
        return RECOMPUTED_CHUNKS
    if weights.device.type != "cpu":
        return 1 << 30
    memory = weights.numel() * weights.element_size()
    return max(1, CACHE_BYTES // max(1, memory))


def _to_chunks(x: Tensor, size: int) -> Tensor:
    """``[B, H, N * G, K] -> [N, B * H, G, K]``."""
    return x.unflatten(2, (-1, size)).permute(2, 0, 1, 3, 4).flatten(1, 2).contiguous()


def _from_chunks(y: Tensor, batch: int) -> Tensor:
    """``[N, B * H, G, V] -> [B, N * G, H, V]``: in memory as it is used next."""
    return y.unflatten(1, (batch, -1)).permute(1, 0, 3, 2, 4).flatten(1, 2)


def _chunked_sum_rule(q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """``Y = Q S + tril(Q K^T) V``, ``S' = S + K^T V``."""
    after = weights + (k.mT @ v).cumsum(0)
    before = torch.cat([weights[None], after[:-1]])
    return q @ before + (q @ k.mT).tril() @ v, after[-1]


class _ChunkedDeltaRule(torch.autograd.Function):
    """A chunk writes ``u = beta z``, where ``z = (I + tril(K K^T, -1) diag(beta))^-1 (V - K S)``.

    The inverse ``R`` is computed for all chunks at once, as is all that does not hang on ``S``: the
    chain over chunks is ``z = R (V - K S)`` and ``S' = S + K^T u``, and its reverse in the backward
    pass. Nothing is divided by beta, which may be zero.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        gram = (k @ k.mT).tril_(-1)
        inverse = torch.linalg.solve_triangular(
            gram * beta.mT, _eye(gram), upper=False, unitriangular=True
        )
        before, asked = [], []
        parts = zip(k.unbind(), v.unbind(), beta.unbind(), inverse.unbind(), strict=True)
        for k_n, v_n, beta_n, inverse_n in parts:
            before.append(weights)
            z = torch.bmm(inverse_n, torch.baddbmm(v_n, k_n, weights, alpha=-1))
            weights = torch.baddbmm(weights, k_n.mT, beta_n * z)
            asked.append(z)
        z, s = torch.stack(asked), torch.stack(before)
        scores = (q @ k.mT).tril_()
        y = _add_product(scores @ (beta * z), q, s)
        ctx.save_for_backward(q, k, beta, gram, inverse, scores, z, s)
        return y, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor, d_weights: Tensor) -> tuple[Tensor, ...]:
        # A backward pass that is started under autocast runs under it.
        with torch.autocast(d_y.device.type, enabled=False):
            saved: list[Any] = [*ctx.saved_tensors, d_y.contiguous(), d_weights]
            return _delta_backward(*saved)


def _delta_backward(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    gram: Tensor,
    inverse: Tensor,
    scores: Tensor,
    z: Tensor,
    s: Tensor,
    d_y: Tensor,
    d_weights: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of ``q, k, v, beta, weights``; names as in the forward pass."""
    by_reading, d_s = scores.mT @ d_y, q.mT @ d_y
    parts = [k, beta, inverse, by_reading, d_s]
    after, d_written, d_asked = [], [], []
    for k_n, beta_n, inverse_n, by_reading_n, d_s_n in zip(
        *(reversed(t.unbind()) for t in parts), strict=True
    ):
        after.append(d_weights)
        d_u = torch.baddbmm(by_reading_n, k_n, d_weights)
        # Also the gradient of v.
        d_v = torch.bmm(inverse_n.mT, beta_n * d_u)
        d_weights = torch.baddbmm(d_weights + d_s_n, k_n.mT, d_v, alpha=-1)
        d_written.append(d_u)
        d_asked.append(d_v)
    d_u, d_v, d_after = (torch.stack(t[::-1]) for t in (d_written, d_asked, after))
    u = beta * z
    d_beta = (z * (d_u - gram.mT @ d_v)).sum(-1, keepdim=True)
    d_scores = (d_y @ u.mT).tril_()
    d_gram = (d_v @ u.mT).tril_(-1)
    d_gram = d_gram + d_gram.mT
    d_q = _add_product(d_scores @ k, d_y, s.mT)
    d_k = _add_product(d_scores.mT @ q, u, d_after.mT)
    _add_product(_add_product(d_k, d_v, s.mT, -1.0), d_gram, k, -1.0)
    return d_q, d_k, d_v, d_beta, d_weights


def _add_product(x: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """``x + alpha a b``, into ``x``."""
    x.flatten(0, 1).baddbmm_(a.flatten(0, 1), b.flatten(0, 1), alpha=alpha)
    return x


def _eye(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device).expand_as(like)


def _identity(x: Tensor) -> Tensor:
    return x


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    feature_map: FeatureMap | None = None,
    chunk_size: int = 1,
    beta: Tensor | None = None,
) -> None:
    if q.shape != k.shape or k.shape[:3] != v.shape[:3]:
        raise MemspanError(
            f"queries, keys and values do not belong together: {[*q.shape]}, {[*k.shape]}, "
            f"{[*v.shape]}; give [B, H, T, K] twice and [B, H, T, V]"
        )
    if beta is not None and beta.shape != k.shape[:3]:
        raise MemspanError(f"beta must be [B, H, T], {[*k.shape[:3]]}, not {[*beta.shape]}")
    if k.shape[2] < 1:
        raise MemspanError("there is no token to read: give at least one")
    if chunk_size < 1:
        raise MemspanError(f"chunk_size must be at least 1, not {chunk_size}")
    width = k.shape[-1]
    if isinstance(feature_map, DPFP):
        width = feature_map.width(width)
    elif feature_map:
        width = feature_map(k[:0]).shape[-1]
    wanted = (*k.shape[:2], width, v.shape[-1])
    if weights.shape != wanted:
        raise MemspanError(
            f"the memory is {[*weights.shape]}, and for these keys and values must be "
            f"{[*wanted]}, [B, H, F, V]"
        )
