"""Data shared by the loops of the Feedback Transformer's fast path: folded weights, and tensors by the
names that they have in ``compiled.c``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from memspan.errors import MemspanError

Buffers = dict[str, Tensor]
"""Weights, by the fields of :class:`FoldedWeights`; keys and values ``kv [2, G, H * B, O + T, K]``,
compiled in memory width first; what :func:`new_buffers` makes; and what a call has: ``visible``,
int64 ``[T, B]``, the number of newest slots that each row sees at each step, where not all see all; and
``kept_`` with a field of :class:`Dropout`."""


@dataclass(frozen=True)
class FoldedWeights:
    """All weights of a stack, stacked over its layers, with constants folded in.

    With pre-norm each norm's gain and bias go into the product that follows; ``1 / sqrt(K)`` and ``u``
    go into the query, ``-u . R_d`` into the position scores. The bias of a product that is added to the
    residual stream is a last row of its weights, which meets a column of ones. ``G`` is 1 where all
    layers share keys and values, else ``L``.
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
    """Weights of a token's states in its memory vector, embedding first: ``[L + 1]``."""
    gains: Tensor
    """With post-norm, where norms come after the sub-layers and nothing is folded: ``[2, L, D]``,
    attention's, then feed-forward's. With pre-norm empty, as ``biases``."""
    biases: Tensor
    """``[2, L, D]``."""
    norms_memory: bool = False
    """True if memory vectors are normalised before the projections."""

    def tensors(self) -> dict[str, Tensor]:
        """The weights by name, in the order of the fields."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "norms_memory"}

    def check(self, span: int) -> None:
        """Raise :class:`MemspanError` where their sizes are not those of one stack with this span."""
        if self.query.dim() != 4 or self.inner.dim() != 3:
            raise MemspanError("query must be [L, H, D, K] and inner [L, D, F]: see FoldedWeights")
        n_layers, n_heads, d_model, width = self.query.shape
        d_ff = self.inner.shape[2]
        groups = max(1, self.n_groups)
        keys = 2 * groups * n_heads * width
        norms = (2, n_layers, d_model) if self.post_norm else (0,)
        sizes: dict[str, tuple[int, ...]] = {
            "query": (n_layers, n_heads, d_model, width),
            "query_bias": (n_layers, n_heads, 1, width),
            "position_keys": (n_layers, n_heads, width, span),
            "position_scores": (n_layers, n_heads, 1, span),
            "output": (n_layers, n_heads * width + 1, d_model),
            "inner": (n_layers, d_model, d_ff),
            "inner_bias": (n_layers, d_ff),
            "outer": (n_layers, d_ff + 1, d_model),
            "memory": (d_model, keys),
            "memory_bias": (keys,),
            "mix": (n_layers + 1,),
            "gains": norms,
            "biases": norms,
        }
        for name, tensor in self.tensors().items():
            if tensor.shape != sizes[name]:
                raise MemspanError(
                    f"weights.{name} must be {[*sizes[name]]} for a query of {[*self.query.shape]} "
                    f"and a span of {span}, not {[*tensor.shape]}"
                )
        if groups not in (1, n_layers):
            raise MemspanError(
                f"keys and values must be one set or one for each of {n_layers} layers, not {groups}"
            )

    @property
    def post_norm(self) -> bool:
        """True if norms come after the sub-layers."""
        return self.gains.numel() > 0

    @property
    def n_groups(self) -> int:
        """Sets of keys and values, G."""
        n_heads, _, width = self.query.shape[1:]
        return self.memory.shape[1] // (2 * n_heads * width)


class Options(NamedTuple):
    """Arguments of one call that are not tensors."""

    span: int
    """Earlier tokens that a token attends to, S."""
    activation: str
    eps: float
    norms_memory: bool
    weights_scale: float = 1.0
    """Dropout's scale of the attention weights; the next is that of all else."""
    scale: float = 1.0


def new_buffers(w: Buffers, options: Options, n_steps: int, batch: int, n_old: int) -> Buffers:
    """Allocate the tensors that the forward loop leaves for the backward loop, uninitialised except for
    columns of ones; heads before rows. A layer's sub-layers are its attention and its feed-forward.

    ``streams``: the residual stream before each sub-layer and after the last, ``[2 * L + 1, T, B, D]``.
    ``sums``: with post-norm, what the norms are given, ``[2 * L, T, B, D]``.
    ``queries``: ``[T, L, H * B, K]``.
    ``attended``: attention output plus a column of ones for the bias, ``[L, T, B, H * K + 1]``.
    ``activated``: activations of the feed-forward plus a column of ones, ``[L, T, B, F + 1]``.
    ``before``: their inputs, ``[L, T, B, F]``; only with gelu, for relu ``activated`` is enough.
    ``vectors``: the tokens' memory vectors, ``[T, B, D]``.
    ``probabilities``: attention weights, one step's ``[L, H * B, n]`` after the other's.
    ``moments``: mean and ``rstd`` of each sub-layer's norm, and of the memory vectors' norm, where
    compiled: ``[2 * L + 1, T, 2, B]``.

    Args:
        w: the weights.
        options: of the call; ``n_steps``: T; ``batch``: B.
        n_old: slots of memory at most, O.
    """
    n_layers, n_heads, d_model, width = w["query"].shape
    new = w["query"].new_empty
    steps = (n_steps, batch)
    d_ff = w["inner"].shape[2]
    n_seen = sum(min(options.span, n_old + t) for t in range(n_steps))
    buffers = {
        "streams": new(2 * n_layers + 1, *steps, d_model),
        "queries": new(n_steps, n_layers, n_heads * batch, width),
        "attended": new(n_layers, *steps, n_heads * width + 1),
        "activated": new(n_layers, *steps, d_ff + 1),
        "vectors": new(*steps, d_model),
        "probabilities": new(n_layers * n_heads * batch * n_seen),
        "moments": new(2 * n_layers + 1, n_steps, 2, batch),
    }
    buffers["attended"][..., -1] = buffers["activated"][..., -1] = 1
    if w["gains"].numel():
        buffers["sums"] = new(2 * n_layers, *steps, d_model)
    if options.activation == "gelu":
        buffers["before"] = new(n_layers, *steps, d_ff)
    return buffers


def new_gradients(b: Buffers, d_out: Tensor, d_vectors: Tensor) -> Buffers:
    """Gradient buffers: ``d_NAME`` has the layout of ``NAME``. They are zero where gradients are added
    up, and begin with those from outside, of the output and the memory vectors.

    ``d_added``: what each sub-layer adds to the residual stream, ``[2 * L, T, B, D]``; the same tensor
    as ``d_streams[1:]`` where neither a norm nor dropout lies between.
    ``d_inner``: inputs of the activation, ``[L, T, B, F]``.
    ``d_query``: queries, ``[L, T, B, H * K]``.
    ``d_projected``: keys and values of the tokens' memory vectors, ``[T, B, 2 * G * H * K]``.
    """
    n_layers, n_heads, _, width = b["query"].shape
    d_streams = torch.empty_like(b["streams"])
    steps = (n_layers, *b["vectors"].shape[:2])
    d_streams[-1] = d_out
    plain = "sums" not in b and "kept_attention" not in b
    new = b["streams"].new_empty
    zeros = {
        f"d_{name}": torch.zeros_like(b[name], memory_format=torch.contiguous_format)
        for name in ("position_keys", "position_scores")
    }
    return zeros | {
        "d_streams": d_streams,
        "d_added": d_streams[1:] if plain else torch.empty_like(d_streams[1:]),
        "d_inner": new(*steps, b["inner"].shape[2]),
        "d_query": new(*steps, n_heads * width),
        "d_vectors": d_vectors.clone(memory_format=torch.contiguous_format),
        "d_projected": new(*steps[1:], b["memory"].shape[1]),
        "d_kv": torch.zeros_like(b["kv"]),
    }


def by_slot(kv: Tensor, batch: int) -> Tensor:
    """``[2, G, H * B, N, K]`` viewed as ``[N, B, 2, G, H, K]``."""
    return kv.unflatten(2, (-1, batch)).permute(4, 3, 0, 1, 2, 5)
