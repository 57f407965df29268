"""Base class of the stacks of layers with relative attention: Transformer-XL's and the Compressive
Transformer's. It has what does not depend on their memories: norms, ties, spans, weights for others."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memspan.models.defaults import M, TransferableWeights
from memspan.models.initialisation import initialise
from memspan.models.packing import STACK
from memspan.models.protocol import Backbone
from memspan.models.readers import BackboneReader
from memspan.models.relative.attention import (
    GATE_BIAS,
    AttentionPass,
    GRUGate,
    RelativeLayer,
    Span,
)
from memspan.models.relative.options import RelativeConfig, RelativeReaderOptions
from memspan.nn import dropout_layer, sinusoids
from memspan.ops.relative import IMPLEMENTATIONS

PARTS = rf"""{STACK} | layers.\d+.attention.(content|position)_bias
    | layers.\d+.attention.((query|key|position).weight | (value|output).(weight|bias))
    | layers.\d+.attention.position_(keys|scores)
    | layers.\d+.(attention|feed_forward)_gate.(of_(branch|stream|reset_stream).weight | bias)
"""
"""Parameters that the reader knows, see :func:`memspan.models.packing.schema_of`."""


class RelativeBackbone(Backbone[M]):
    """A stack of layers with relative attention."""

    config: RelativeConfig
    implementations = tuple(IMPLEMENTATIONS)
    tables = ("position_keys", "position_scores")

    def __init__(
        self, config: RelativeConfig, layers: Iterable[RelativeLayer], epsilon: float = 1e-5
    ) -> None:
        super().__init__(config)
        self.dropout = dropout_layer(config.dropout)
        self.layers = nn.ModuleList(layers)
        self.final_norm = (
            nn.LayerNorm(config.d_model, epsilon)
            if config.normalisation == "pre" and config.final_norm
            else nn.Identity()
        )
        if config.tie_position_biases:
            first, *others = (layer.attention for layer in self.stack())
            for attention in others:
                attention.content_bias = first.content_bias
                attention.position_bias = first.position_bias
        initialise(self, config.initialisation, config.n_layers)
        for module in self.modules():
            if isinstance(module, GRUGate):
                nn.init.constant_(module.bias, GATE_BIAS)

    def stack(self) -> Iterator[RelativeLayer]:
        """The layers, first to last."""
        return iter(self.layers)  # type: ignore[arg-type]

    @property
    def one_weight(self) -> Tensor:
        """A parameter whose type and device computations use: ``u`` of the first layer."""
        return next(self.stack()).attention.content_bias

    def units(self) -> list[nn.Module]:
        """See :meth:`Backbone.units`: no layer has tied biases for itself."""
        if self.config.tie_position_biases:
            return [layer.feed_forward for layer in self.stack()]
        return super().units()

    def span(self, attention_span: str | None = None, clamp_length: int | None = None) -> Span:
        """The model's own span, or another one (None: as configured)."""
        if (attention_span, clamp_length) != (None, None):
            # Not in graphs of torch.compile, which ask for the model's own.
            RelativeReaderOptions(attention_span, clamp_length)  # type: ignore[arg-type]
        config = self.config
        return Span(
            config.attention_span if attention_span is None else attention_span,
            config.clamp_length if clamp_length is None else clamp_length,
        )

    def longest_piece(self, span: Span, slots: int) -> int | None:
        """The most tokens that are read at once, where a longer segment gives the same in pieces (None:
        it does not)."""
        return None

    def longest_segment(  # type: ignore[override]
        self, memory: M, *, attention_span: str | None = None, clamp_length: int | None = None
    ) -> int | None:
        """See :meth:`Backbone.longest_segment`: learned tables end somewhere, sinusoids do not."""
        rows = self.config.max_distance
        slots = sum(memory.slots().values())
        span = self.span(attention_span, clamp_length)
        # The first segment that is too long, unless clamped or limited distances always fit.
        if rows is None or span.largest_code(rows + 1, slots) < rows:
            return None
        return max(rows - slots, 0)

    def reader(  # type: ignore[override]
        self,
        memory: M | None,
        batch_size: int,
        *,
        attention_span: str | None = None,
        clamp_length: int | None = None,
        cuda_graph: bool = False,
    ) -> BackboneReader[M]:
        """A reader that caches the keys and values of memory, with another span or clamp than the
        model's (None: as configured). The models of Transformer-XL's paper were trained with span
        ``segment`` and scored with ``fixed`` and a clamp. ``cuda_graph``: see :meth:`Backbone.reader`;
        keys and values of memory are then projected for each token.
        """
        span = self.span(attention_span, clamp_length)
        memory = self.own_memory(memory, batch_size)
        span.check_slots(sum(memory.slots().values()))
        return super().reader(memory, batch_size, span=span, cuda_graph=cuda_graph)

    def reader_type(self) -> Callable[..., BackboneReader[M]]:
        from memspan.models.relative.reader import RelativeReader

        return RelativeReader

    def codes(self, span: Span, slots: int, n_tokens: int) -> Tensor:
        """Codes of the distances in a pass over ``slots`` of memory and ``n_tokens``, the same for all
        layers: see :meth:`Span.codes`."""
        codes = span.codes(self.config, slots + n_tokens, slots, self.one_weight)
        return self.dropout(codes) if codes.is_floating_point() else codes  # type: ignore[no-any-return]

    def run(self, layer: RelativeLayer, h: Tensor, memory: Any, shared: AttentionPass) -> Any:
        """``layer`` on ``h [B, T, D]`` and its own memory, see :meth:`Backbone.through`."""
        # Recomputed layers would append their weights to the caller's list again.
        call = self.through if shared.weights is None else operator.call
        return call(layer, h, memory, None, shared)

    @torch.no_grad()
    def transferable_weights(self, distances: Tensor) -> TransferableWeights | None:
        """With learned tables as they are, or ``W R_d`` and ``v . W R_d`` as tables. None with gates,
        where sub-layers are not added to the stream."""
        config = self.config
        layers = []
        if config.gating != "none":
            return None
        for layer in self.stack():
            attention = layer.attention
            u = attention.content_bias
            v = attention.position_bias
            weights: dict[str, Tensor] = {
                name.removeprefix("attention."): parameter
                for name, parameter in layer.named_parameters()
                if not name.startswith(("attention.position", "attention.compression."))
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
