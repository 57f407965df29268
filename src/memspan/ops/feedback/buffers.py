"""Data shared by the loops of the Feedback Transformer's fast path: folded weights, tensors saved for
backward, and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from memspan.errors import MemspanError
from memspan.ops.feedback.dropout import Kept


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
    """Whether memory vectors are normalised before the projections."""

    def tensors(self) -> dict[str, Tensor]:
        """The weights by name, in the order of the fields."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "norms_memory"}

    @classmethod
    def of(cls, tensors: Sequence[Tensor], norms_memory: bool) -> FoldedWeights:
        """The inverse of :meth:`tensors`, from its values."""
        names = [f.name for f in fields(cls) if f.name != "norms_memory"]
        named: dict[str, Any] = dict(zip(names, tensors, strict=True))
        return cls(**named, norms_memory=norms_memory)

    def check(self, span: int) -> None:
        """Raise :class:`MemspanError` where their sizes are not those of one stack with this span."""
        if self.query.dim() != 4 or self.inner.dim() != 3:
            raise MemspanError("query must be [L, H, D, K] and inner [L, D, F]: see FoldedWeights")
        n_layers, n_heads, d_model, width = self.query.shape
        d_ff, groups = self.inner.shape[2], max(1, self.n_groups)
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
        """Whether norms come after the sub-layers."""
        return self.gains.numel() > 0

    @property
    def n_groups(self) -> int:
        """Sets of keys and values, G."""
        n_heads, _, width = self.query.shape[1:]
        return self.memory.shape[1] // (2 * n_heads * width)


class Call(NamedTuple):
    """Options of one call, and which slots of memory are valid in it."""

    n_old: int
    """Slots of memory before the first token, O."""
    span: int
    """Earlier tokens that a token attends to, S."""
    activation: str
    eps: float
    additive_mask: Tensor | None = None
    """Additive mask over memory slots, ``[B, O]``; None if every row has all of them."""
    has_memory: Tensor | None = None
    """1 for a row with any valid slot, else 0, ``[B]``; None likewise."""
    kept: Kept | None = None
    """What dropout keeps (None: all)."""

    def masks(self, like: Tensor) -> tuple[list[Tensor], list[float]]:
        """The tensors and the scales in it, for :meth:`with_masks`; missing tensors are empty, of the
        type of ``like``."""
        kept = Kept() if self.kept is None else self.kept
        tensors = (self.additive_mask, self.has_memory, *kept[:4])
        scales = [kept.weights_scale, kept.scale]
        return [like.new_empty(0) if t is None else t for t in tensors], scales

    def with_masks(self, masks: Sequence[Tensor], scales: Sequence[float]) -> Call:
        """The same call with these."""
        given = [t if t.numel() else None for t in masks]
        weights, attention, activated, feed_forward = given[2:]
        kept = Kept(weights, attention, activated, feed_forward, *scales)
        drops = any(t is not None for t in kept[:4])
        return self._replace(
            additive_mask=given[0], has_memory=given[1], kept=kept if drops else None
        )


class Forward(Protocol):
    """The forward loop. Reading on, it is called for each segment."""

    def __call__(self, call: Call, kv: Tensor, start: int = 0, /) -> None:
        """Read; ``start`` is the first slot in ``kv`` that the first token sees."""


@dataclass
class Saved:
    """Saved for backward; heads before rows."""

    states: Tensor
    """The input and every layer's output, ``[L + 1, T, B, D]``."""
    middles: Tensor
    """The residual stream between the sub-layers, ``[L, T, B, D]``."""
    queries: Tensor
    """``[T, L, H * B, K]``."""
    attended: Tensor
    """Attention output plus a column of ones for the bias: ``[L, T, B, H * K + 1]``."""
    activated: Tensor
    """Activations of the feed-forward plus a column of ones: ``[L, T, B, F + 1]``."""
    before: Tensor
    """Their inputs, ``[L, T, B, F]``, for gelu; for relu a view of ``activated``, which is enough."""
    vectors: Tensor
    """The tokens' memory vectors, ``[T, B, D]``."""
    kv: Tensor
    """Keys and values, ``[2, G, H * B, O + T, K]``; compiled, in memory width first."""
    sums: Tensor
    """With post-norm, what the norms are given: ``[2, L, T, B, D]``, after attention, then after the
    feed-forward; else empty."""
    memory_moments: Tensor
    """Mean and ``rstd`` of memory vectors, ``[T, 2, B]``; set where they are normalised."""
    mean: list[list[Any]] | None = None
    """Means of each norm at each step, ``[B, 1]``: attention's, then feed-forward's, by layer."""
    rstd: list[list[Any]] | None = None
    """Reciprocals of standard deviations, likewise."""
    moments: Tensor | None = None
    """Both in one tensor, ``[L, T, 4, B]``, where compiled."""
    probabilities: Any = None
    """Attention weights of each step, ``[L, H * B, 1, n]``; compiled, all in one tensor."""

    @classmethod
    def empty(cls, w: FoldedWeights, call: Call, n_steps: int, batch: int, kv: Tensor) -> Saved:
        """Uninitialised but for the columns of ones."""
        n_layers, n_heads, d_model, width = w.query.shape
        new, steps = w.query.new_empty, (n_layers, n_steps, batch)
        attended, activated = new(*steps, n_heads * width + 1), new(*steps, w.inner.shape[2] + 1)
        attended[..., -1] = activated[..., -1] = 1
        gelu = call.activation == "gelu"
        return cls(
            states=new(n_layers + 1, n_steps, batch, d_model),
            middles=new(*steps, d_model),
            queries=new(n_steps, n_layers, n_heads * batch, width),
            attended=attended,
            activated=activated,
            before=new(*steps, w.inner.shape[2]) if gelu else activated[..., :-1],
            vectors=new(n_steps, batch, d_model),
            kv=kv,
            sums=new(2, *steps, d_model) if w.post_norm else new(0),
            memory_moments=new(n_steps, 2, batch),
        )


@dataclass
class Gradients:
    """Gradients, named and laid out as in :class:`Saved`."""

    states: Tensor
    """The layers' outputs, ``[L, T, B, D]``."""
    middles: Tensor
    """``[L, T, B, D]``."""
    attention: Tensor
    """What attention adds to the residual stream, ``[L, T, B, D]``; the same tensor as ``middles``
    where neither a norm nor dropout lies between."""
    feed_forward: Tensor
    """What the feed-forward adds, as ``attention``; the same tensor as ``states``."""
    inner: Tensor
    """Inputs of the activation, ``[L, T, B, F]``."""
    query: Tensor
    """``[L, T, B, H * K]``."""
    first: Tensor
    """The input, ``[T, B, D]``."""
    mixed: Tensor
    """The memory vectors, ``[T, B, D]``."""
    projected: Tensor
    """Their keys and values, ``[T, B, 2 * G * H * K]``."""
    kv: Tensor
    """``[2, G, H * B, O + T, K]``."""
    position_keys: Tensor
    """``[L, H, K, S]``."""
    position_scores: Tensor
    """``[L, H, 1, S]``."""

    @classmethod
    def empty(cls, saved: Saved, w: FoldedWeights, call: Call) -> Gradients:
        """Uninitialised, but zero where gradients are added up."""
        like, empty, zeros = saved.middles, torch.empty_like, torch.zeros_like
        states, middles = empty(like), empty(like)
        plain = not w.post_norm and call.kept is None
        n_heads, _, width = w.query.shape[1:]
        return cls(
            states=states,
            middles=middles,
            attention=middles if plain else empty(like),
            feed_forward=states if plain else empty(like),
            inner=like.new_empty(*like.shape[:3], w.inner.shape[2]),
            query=like.new_empty(*like.shape[:3], n_heads * width),
            first=empty(saved.vectors),
            mixed=empty(saved.vectors),
            projected=like.new_empty(*like.shape[1:3], w.memory.shape[1]),
            kv=zeros(saved.kv),
            position_keys=zeros(w.position_keys, memory_format=torch.contiguous_format),
            position_scores=zeros(w.position_scores, memory_format=torch.contiguous_format),
        )


def mask_of_old_slots(length: Tensor, n_old: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``additive_mask`` and ``has_memory`` of :class:`Call`."""
    absent = torch.arange(n_old, device=length.device) < (n_old - length)[:, None]
    # Its exponential is zero, and it is finite: a row without tokens must not become NaN.
    additive_mask = torch.zeros_like(absent, dtype=dtype)
    additive_mask.masked_fill_(absent, torch.finfo(dtype).min / 4)
    return additive_mask, (length > 0).to(dtype)


def by_slot(kv: Tensor, batch: int) -> Tensor:
    """``[2, G, H * B, N, K]`` viewed as ``[N, B, 2, G, H, K]``."""
    return kv.unflatten(2, (-1, batch)).permute(4, 3, 0, 1, 2, 5)
