"""What the architectures with a memory of hidden states share: Transformer-XL and the Compressive
Transformer.

Multi-head self-attention over a memory and a segment with relative positions, around
:func:`memspan.ops.relative.relative_attention`; the layer and the stack around it; and what
their readers keep of the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memspan.errors import MemspanError, refuse_unknown
from memspan.models.initialisation import initialise
from memspan.models.packing import (
    Schema,
    dropout,
    feed_forward,
    layer_norm,
    linear,
    module_list,
)
from memspan.models.protocol import Backbone, M, TransferableWeights
from memspan.models.relative.gate import GRUGate, gate_schema
from memspan.models.relative.options import RelativeConfig
from memspan.models.segments import Documents
from memspan.nn import FeedForward, dropout_layer, known, sinusoids
from memspan.ops.implementations import refuse_unknown_implementation
from memspan.ops.relative import (
    IMPLEMENTATIONS,
    Positions,
    attention_weights,
    relative_attention,
)

AttentionSpan = Literal["segment", "fixed"]


@dataclass(frozen=True)
class Span:
    """The keys that a query attends to, and the distances that have a position code of their own.

    No parameter depends on it, so a trained model may be read with another one.
    """

    attention: str
    """``segment``: all of memory and the segment's past. ``fixed``: the last ``slots`` positions, the
    query's own included, ``slots`` being the memory's size."""
    clamp_length: int | None
    """Distances over this share its code (None: each has its own)."""

    def largest_code(self, n_distances: int, slots: int) -> int:
        """Of the distances ``0 .. n_distances - 1`` the largest with a code of its own."""
        limit = n_distances - 1
        if self.attention == "fixed":
            limit = min(limit, slots - 1)
        return limit if self.clamp_length is None else min(limit, self.clamp_length)

    def visible(
        self,
        used: Tensor,
        n_queries: int,
        n_old: int,
        slots: int,
        documents: Documents | None = None,
    ) -> Tensor:
        """Mask ``[B, T, N + T]``: the right-most ``used [B]`` of N old columns, the segment's past.

        ``slots``: the memory's size, N where no column is left out. ``documents``: the segment's.
        """
        query = torch.arange(n_old, n_old + n_queries, device=used.device)[:, None]
        key = torch.arange(n_old + n_queries, device=used.device)
        mask = key <= query
        if self.attention == "fixed":
            mask = mask & (query - key < slots)
        mask = mask & (key >= n_old - used[:, None, None])
        return mask if documents is None else documents.mask(mask)


@dataclass(frozen=True)
class AttentionPass:
    """What the attention of all layers shares in one pass."""

    codes: Tensor
    """Of the distances, see :meth:`RelativeBackbone.position_codes`."""
    mask: Tensor
    """Bool ``[B, T, S]``."""
    implementation: str | None
    """Of :func:`relative_attention`."""
    weights: list[Tensor] | None
    """A list that receives each layer's attention weights ``[B, H, T, S]`` (None: not wanted)."""


@known
class RelativeSelfAttention(nn.Module):
    """Queries from the segment, keys and values from memory and segment (Dai et al. 2019, section 3.3).

    Args:
        d_model: width of the input, D.
        n_heads: heads, H.
        head_width: width of one head, K.
        table_rows: rows of the learned position tables (None: the paper's projected sinusoids).
        bias: biases on the value and output projections.
        dropout: probability with which an attention weight is dropped in training.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_width: int,
        *,
        table_rows: int | None,
        bias: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.n_heads, self.head_width, self.dropout = n_heads, head_width, dropout
        inner = n_heads * head_width
        self.query = nn.Linear(d_model, inner, bias=False)
        self.key = nn.Linear(d_model, inner, bias=False)
        self.value = nn.Linear(d_model, inner, bias=bias)
        self.output = nn.Linear(inner, d_model, bias=bias)
        if table_rows is None:
            self.position = nn.Linear(d_model, inner, bias=False)
        else:
            self.position_keys = nn.Parameter(torch.empty(table_rows, n_heads, head_width))
            self.position_scores = nn.Parameter(torch.empty(table_rows, n_heads))

    def heads(self, x: Tensor) -> Tensor:
        """``[B, T, H*K] -> [B, H, T, K]``."""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def distances(self, codes: Tensor) -> tuple[Tensor, Tensor | None]:
        """Keys ``[H, S, K]`` and scores ``[H, S]`` of the distances ``0 .. S-1``.

        ``codes``: their sinusoids ``[S, D]``, or their rows ``int64 [S]`` in the learned tables.
        """
        if codes.is_floating_point():
            keys = self.position(codes).unflatten(-1, (self.n_heads, self.head_width))
            return keys.transpose(0, 1), None
        return self.position_keys[codes].transpose(0, 1), self.position_scores[codes].t()

    def project(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of ``x [B, T, D]``, keys and values of ``memory [B, M, D]`` and ``x``, per head.

        The two are projected apart: no gradient is computed for a memory that is detached.
        """
        keys = torch.cat([self.key(memory), self.key(x)], 1)
        values = torch.cat([self.value(memory), self.value(x)], 1)
        return self.heads(self.query(x)), self.heads(keys), self.heads(values)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        shared: AttentionPass,
        biases: tuple[Tensor, Tensor | None],
        received: Tensor | None = None,
    ) -> Tensor:
        """The sub-layer's output ``[B, T, D]`` from what :meth:`project` returned.

        Args:
            q: queries ``[B, H, T, K]``.
            k: keys ``[B, H, S, K]`` of memory and segment; ``v`` likewise.
            shared: what all layers share in this pass.
            biases: ``u`` and ``v`` of :meth:`RelativeBackbone.biases`.
            received: ``[B, S]``; the attention that each key receives is added to it.
        """
        keys, scores = self.distances(shared.codes)
        positions = Positions(keys, scores, *biases)
        if shared.weights is not None:
            # Without a graph, which would live as long as the caller's list.
            with torch.no_grad():
                shared.weights.append(attention_weights(q, k, positions, mask=shared.mask))
        attended = relative_attention(
            q,
            k,
            v,
            positions,
            mask=shared.mask,
            dropout=self.dropout if self.training else 0.0,
            implementation=shared.implementation,
            received=received,
        )
        return self.output(attended.transpose(1, 2).flatten(2))


class RelativeLayer(nn.Module):
    """Attention and feed-forward sub-layers, each with its norm and its residual sum or gate."""

    def __init__(self, config: RelativeConfig) -> None:
        super().__init__()
        self.pre = config.normalisation == "pre"
        self.attention = RelativeSelfAttention(
            config.d_model,
            config.n_heads,
            config.head_width,
            table_rows=_table_rows(config),
            bias=config.attention_bias,
            dropout=config.attention_dropout,
        )
        self.feed_forward = FeedForward(
            config.d_model, config.d_ff, config.activation, config.dropout
        )
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)
        self.dropout = dropout_layer(config.dropout)
        gated = config.gating == "gru"
        self.attention_gate = GRUGate(config.d_model) if gated else None
        self.feed_forward_gate = GRUGate(config.d_model) if gated else None

    def normalise_context(self, context: Tensor) -> Tensor:
        """What keys and values are computed from: with pre-norm, the normalised context."""
        return self.attention_norm(context) if self.pre else context

    def project(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of ``x``, keys and values of ``memory`` and ``x``, per head."""
        return self.attention.project(self.normalise_context(x), self.normalise_context(memory))

    def residual(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer: residual sums or gates, norms and feed-forward, ``[B, T, D]``."""
        if self.pre:
            x = self._joined(x, attended, self.attention_gate)
            fed = self.feed_forward(self.feed_forward_norm(x))
            return self._joined(x, fed, self.feed_forward_gate)
        x = self.attention_norm(x + self.dropout(attended))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))

    def _joined(self, x: Tensor, branch: Tensor, gate: GRUGate | None) -> Tensor:
        branch = self.dropout(branch)
        return x + branch if gate is None else gate(x, branch)


class RelativeBackbone(Backbone[M]):
    """A stack of layers and the biases and position codes of their attention."""

    config: RelativeConfig
    implementations = tuple(IMPLEMENTATIONS)
    tables = ("position_keys", "position_scores")

    def __init__(self, config: RelativeConfig, layers: Iterable[RelativeLayer]) -> None:
        super().__init__(config)
        self.dropout = dropout_layer(config.dropout)
        self.layers = nn.ModuleList(layers)
        self.final_norm = (
            nn.LayerNorm(config.d_model)
            if config.normalisation == "pre" and config.final_norm
            else nn.Identity()
        )
        biases = (
            1 if config.tie_position_biases else config.n_layers,
            config.n_heads,
            config.head_width,
        )
        self.content_bias = nn.Parameter(torch.zeros(biases))
        self.position_bias = (
            nn.Parameter(torch.zeros(biases)) if config.positions == "sinusoidal" else None
        )
        initialise(self, config.initialisation, config.n_layers)
        for module in self.modules():
            if isinstance(module, GRUGate):
                module.initialise()

    def stack(self) -> Iterator[RelativeLayer]:
        """The layers, first to last."""
        return iter(self.layers)  # type: ignore[arg-type]

    def biases(self, n: int) -> tuple[Tensor, Tensor | None]:
        """``u`` and ``v`` of layer ``n``, ``[H, K]`` each; ``v`` only with sinusoidal positions."""
        n = 0 if self.config.tie_position_biases else n
        return self.content_bias[n], None if self.position_bias is None else self.position_bias[n]

    def span(self, attention_span: str | None = None, clamp_length: int | None = None) -> Span:
        """The model's own span, or another one (None: as configured)."""
        refuse_unknown("attention span", attention_span, AttentionSpan)
        if clamp_length is not None and clamp_length < 1:
            raise MemspanError(f"clamp_length must be at least 1, not {clamp_length}")
        config = self.config
        return Span(
            config.attention_span if attention_span is None else attention_span,
            config.clamp_length if clamp_length is None else clamp_length,
        )

    def position_codes(self, n_distances: int, slots: int, span: Span | None = None) -> Tensor:
        """Codes of the distances ``0 .. n-1``: sinusoids ``[n, D]`` or table rows ``int64 [n]``.

        Args:
            n_distances: n.
            slots: the memory's size.
            span: None: the model's own.
        """
        limit = (span or self.span()).largest_code(n_distances, slots)
        self._check_span(limit + 1, slots)
        distance = torch.arange(n_distances, device=self.content_bias.device).clamp(max=limit)
        if self.position_bias is None:
            return distance
        return sinusoids(distance, self.config.d_model, self.content_bias.dtype)

    def longest_segment(  # type: ignore[override]
        self, memory: M, *, attention_span: str | None = None, clamp_length: int | None = None
    ) -> int | None:
        """See :meth:`Backbone.longest_segment`: learned tables end somewhere, sinusoids do not."""
        rows, slots = _table_rows(self.config), sum(memory.slots().values())
        # The first segment that is too long, unless clamped or limited distances always fit.
        if (
            rows is None
            or self.span(attention_span, clamp_length).largest_code(rows + 1, slots) < rows
        ):
            return None
        return max(rows - slots, 0)

    def attention_pass(
        self,
        used: Tensor,
        n_tokens: int,
        slots: int,
        documents: Documents | None,
        implementation: str | None,
        weights: list[Tensor] | None,
        span: Span | None,
    ) -> AttentionPass:
        """What all layers share in one pass.

        Args:
            used: valid slots of memory per row, counted from the right, int64 ``[B]``.
            n_tokens: T, the segment's length.
            slots: columns of memory.
            documents: the segment's (None: no document starts, no row is padded).
            implementation: of :func:`memspan.ops.relative.relative_attention`.
            weights: a list that receives each layer's attention weights (None: not wanted).
            span: None: the model's own.

        Raises:
            MemspanError: no such implementation; a learned position table is too short.
        """
        refuse_unknown_implementation(implementation, self.implementations)
        span = self.span() if span is None else span
        codes = self.position_codes(slots + n_tokens, slots, span)
        return AttentionPass(
            codes=self.dropout(codes) if codes.is_floating_point() else codes,
            mask=span.visible(used, n_tokens, slots, slots, documents),
            implementation=implementation,
            weights=weights,
        )

    @torch.no_grad()
    def transferable_weights(self, distances: Tensor) -> TransferableWeights | None:
        """With learned tables as they are, or ``W R_d`` and ``v . W R_d`` as tables. None with gates:
        what their sub-layers return is no summand."""
        config, layers = self.config, []
        if config.gating != "none":
            return None
        for n, layer in enumerate(self.stack()):
            attention, (u, v) = layer.attention, self.biases(n)
            weights = {
                f"{of}.{name}": parameter
                for of in ("query", "key", "value", "output")
                for name, parameter in getattr(attention, of).named_parameters()
            }
            weights |= {
                name: parameter
                for name, parameter in layer.named_parameters()
                if name.startswith(("attention_norm.", "feed_forward"))
            }
            if v is None:
                there = distances[distances < len(attention.position_keys)]
                keys = attention.position_keys[there]
                scores = attention.position_scores[there]
            else:
                codes = sinusoids(distances, config.d_model, torch.float32)
                keys = F.linear(codes, attention.position.weight.cpu())
                keys = keys.unflatten(1, (config.n_heads, config.head_width))
                scores = torch.einsum("phk,hk->ph", keys, v.cpu())
            weights |= {"content_bias": u, "position_keys": keys, "position_scores": scores}
            layers.append(weights)
        final_norm = dict(self.final_norm.named_parameters())
        return TransferableWeights(config.n_heads, config.head_width, layers, final_norm)

    def _check_span(self, needed: int, slots: int) -> None:
        rows = _table_rows(self.config)
        if rows is None or needed <= rows:
            return
        if slots < rows:
            remedy = f"read segments of at most {rows - slots}"
        else:
            remedy = f"set memory_length so that memory has at most {rows - 1} slots"
        fixed = "attention_span fixed or " if slots <= rows else ""
        raise MemspanError(
            f"a span of {needed} slots, {slots} of them memory, exceeds the learned position table of "
            f"{rows} rows: {remedy}, or read with {fixed}clamp_length {rows - 1}"
        )


def layer_schema(
    kind: type[RelativeLayer], config: RelativeConfig, epsilon: float, **more: Schema
) -> Schema:
    """Of a layer of this ``kind`` with these norms' epsilon; ``more``: its other modules."""
    d, heads = config.d_model, (config.n_heads, config.head_width)
    inner, rows, bias = heads[0] * heads[1], _table_rows(config), config.attention_bias
    tables = {"position_keys": (rows, *heads), "position_scores": (rows, heads[0])} if rows else {}
    products = {
        "query": linear(d, inner, bias=False),
        "key": linear(d, inner, bias=False),
        "value": linear(d, inner, bias),
        "output": linear(inner, d, bias),
    }
    if not rows:
        products["position"] = linear(d, inner, bias=False)
    if config.gating == "gru":
        more |= {"attention_gate": gate_schema(d), "feed_forward_gate": gate_schema(d)}
    return Schema(
        kind,
        attributes={"pre": config.normalisation == "pre"},
        modules={
            "attention": Schema(
                RelativeSelfAttention,
                tables,
                {"n_heads": heads[0], "head_width": heads[1]},
                products,
            ),
            "feed_forward": feed_forward(d, config.d_ff, config.activation, config.dropout),
            "attention_norm": layer_norm(d, epsilon),
            "feed_forward_norm": layer_norm(d, epsilon),
            "dropout": dropout(config.dropout),
            **more,
        },
    )


def backbone_schema(
    kind: type[RelativeBackbone[M]], config: RelativeConfig, layer: Schema, epsilon: float
) -> Schema:
    """Of a stack of this ``kind`` with layers like ``layer``."""
    sets = 1 if config.tie_position_biases else config.n_layers
    names = ("content_bias", "position_bias")[: 1 + (config.positions == "sinusoidal")]
    normalises = config.normalisation == "pre" and config.final_norm
    return Schema(
        kind,
        {name: (sets, config.n_heads, config.head_width) for name in names},
        {"config": config},
        {
            "dropout": dropout(config.dropout),
            "layers": module_list([layer] * config.n_layers),
            "final_norm": layer_norm(config.d_model, epsilon)
            if normalises
            else Schema(nn.Identity),
        },
    )


def _table_rows(config: RelativeConfig) -> int | None:
    """Rows of the learned tables; None for sinusoids."""
    if config.positions == "sinusoidal":
        return None
    if config.max_distance is None:
        raise MemspanError(
            "learned positions need a table size: set max_distance to the longest span in "
            "use, memory and segment together"
        )
    return config.max_distance
