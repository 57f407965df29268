"""The stack of the architectures with a memory of hidden states: Transformer-XL's and the Compressive
Transformer's."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memspan.models.initialisation import initialise
from memspan.models.output import BackboneOutput
from memspan.models.packing import STACK
from memspan.models.protocol import Backbone, BackboneReader, M, TransferableWeights
from memspan.models.relative.options import RelativeConfig, RelativeReaderOptions
from memspan.models.relative.self_attention import (
    GATE_BIAS,
    AttentionPass,
    GRUGate,
    RelativeLayer,
    Span,
)
from memspan.models.segments import Padding, documents_of, read_by_length
from memspan.nn import dropout_layer, sinusoids
from memspan.ops.relative import IMPLEMENTATIONS

PARTS = rf"""{STACK} | (content|position)_bias
    | layers.\d+.attention.((query|key|position).weight | (value|output).(weight|bias))
    | layers.\d+.attention.position_(keys|scores)
    | layers.\d+.(attention|feed_forward)_gate.(of_(branch|stream|reset_stream).weight | bias)
"""
"""What the reader knows, see :func:`memspan.models.packing.schema_of`."""


class RelativeBackbone(Backbone[M]):
    """A stack of layers and the biases and position codes of their attention."""

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
                nn.init.constant_(module.bias, GATE_BIAS)

    def stack(self) -> Iterator[RelativeLayer]:
        """The layers, first to last."""
        return iter(self.layers)  # type: ignore[arg-type]

    def biases(self, n: int) -> tuple[Tensor, Tensor | None]:
        """``u`` and ``v`` of layer ``n``, ``[H, K]`` each; ``v`` only with sinusoidal positions."""
        n = 0 if self.config.tie_position_biases else n
        return self.content_bias[n], None if self.position_bias is None else self.position_bias[n]

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
        rows, slots = self.config.max_distance, sum(memory.slots().values())
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
    ) -> BackboneReader[M]:
        """A reader that caches the keys and values of memory, with another span or clamp than the
        model's (None: as configured). The models of Transformer-XL's paper were trained with span
        ``segment`` and scored with ``fixed`` and a clamp.
        """
        span = self.span(attention_span, clamp_length)
        memory = self.own_memory(memory, batch_size)
        span.check_slots(sum(memory.slots().values()))
        return super().reader(memory, batch_size, span=span)

    def reader_type(self) -> Callable[..., BackboneReader[M]]:
        from memspan.models.relative.reader import RelativeReader

        return RelativeReader

    def forward(
        self,
        x: Tensor,
        memory: M | None = None,
        *,
        starts: Tensor | None = None,
        lengths: Tensor | None = None,
        padding: Padding = "right",
        implementation: str | None = None,
        attention_weights: list[Tensor] | None = None,
        span: Span | None = None,
    ) -> BackboneOutput[M]:
        """Read a segment, see :meth:`memspan.models.Backbone.forward`.

        Args:
            implementation: of :func:`memspan.ops.relative.relative_attention`.
            attention_weights: a list that receives each layer's weights, ``[B, H, T, N + T]`` over the
                ``N`` slots of memory, of which a row's valid ones stand right-most, and the segment;
                before dropout and without gradient, for inspection. Left padding counts as right
                padding in it.
            span: the keys and distances that are told apart (None: as configured).

        Raises:
            MemspanError: no such implementation; a learned position table is too short.
        """
        memory = self.initial_memory(x.shape[0]) if memory is None else memory
        span = self.span() if span is None else span
        slots, n_tokens = sum(memory.slots().values()), x.shape[1]
        longest = self.longest_piece(span, slots)
        # Not in compiled graphs, whose sizes may be free, nor where dropout draws for a whole segment.
        if (
            longest is not None
            and not torch.compiler.is_compiling()
            and n_tokens > longest
            and attention_weights is None
            and not (self.training and (self.config.dropout or self.config.attention_dropout))
        ):
            read = partial(self.forward, implementation=implementation, span=span)
            return read_by_length(read, x, memory, starts, lengths, padding, longest)
        x, documents = documents_of(x, starts, lengths, padding)
        used, *others = (getattr(memory, name) for name in memory.slots())
        codes = span.codes(self.config, slots + n_tokens, slots, self.content_bias)
        shared = AttentionPass(
            codes=self.dropout(codes) if codes.is_floating_point() else codes,
            mask=span.visible(sum(others, used), n_tokens, slots, slots, documents),
            implementation=implementation,
            weights=attention_weights,
            documents=documents,
        )
        # Recomputed layers would append their weights to the caller's list again.
        run = self.through if attention_weights is None else operator.call
        h, memory, loss, statistics = self.read_layers(self.dropout(x), memory, shared, run)
        hidden = self.final_norm(h)
        hidden = hidden if documents is None else documents.put_back(hidden)
        return BackboneOutput(hidden, memory, loss, statistics)

    def read_layers(
        self, h: Tensor, memory: M, shared: AttentionPass, run: Callable[..., Any]
    ) -> tuple[Tensor, M, Tensor, dict[str, Tensor]]:
        """Take ``h [B, T, D]`` through the layers, each called as ``run(layer, ...)``: what comes out
        of the last one, the memory after the segment, and the loss and statistics of the output."""
        raise NotImplementedError

    @torch.no_grad()
    def transferable_weights(self, distances: Tensor) -> TransferableWeights | None:
        """With learned tables as they are, or ``W R_d`` and ``v . W R_d`` as tables. None with gates,
        where sub-layers are not added to the stream."""
        config, layers = self.config, []
        if config.gating != "none":
            return None
        for n, layer in enumerate(self.stack()):
            attention, (u, v) = layer.attention, self.biases(n)
            weights: dict[str, Tensor] = {
                name.removeprefix("attention."): parameter
                for name, parameter in layer.named_parameters()
                if not name.startswith(("attention.position", "compression."))
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
