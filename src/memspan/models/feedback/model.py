"""Feedback Transformer (Fan et al. 2020, arXiv 2002.09402): memory and stack.

The model reads token by token. Every layer attends to the memory vectors of earlier tokens. A token's
memory vector is a weighted sum of its hidden states in all layers, so that even the lowest layer of the
next token sees what the highest layer computed. Options: :class:`memspan.models.FeedbackConfig`. One
layer, and what a token writes: ``layer.py``. Weights for the fast loops: ``folding.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memspan.devices import can_look
from memspan.errors import MemspanError
from memspan.memory import Memory
from memspan.models.defaults import AttentionWeights
from memspan.models.feedback.config import FeedbackConfig
from memspan.models.feedback.folding import fold
from memspan.models.feedback.layer import (
    FeedbackLayer,
    FeedbackStep,
    Projected,
    first_layer_weights,
)
from memspan.models.initialisation import initialise
from memspan.models.known import known
from memspan.models.output import BackboneOutput
from memspan.models.packing import STACK, schema_of
from memspan.models.protocol import Backbone
from memspan.models.readers import BackboneReader
from memspan.models.segments import Documents, Padding, read_whole
from memspan.nn import count_after, dropout_layer, without_padding
from memspan.ops.feedback import compiled as feedback_loop
from memspan.ops.feedback.buffers import FoldedWeights
from memspan.ops.feedback.dropout import NO_DROPOUT, Dropout, draw
from memspan.ops.feedback.recurrence import IMPLEMENTATIONS, feedback_recurrence
from memspan.ops.implementations import refuse_unknown_implementation
from memspan.trees import check_config, zeros_for

PARTS = rf"""{STACK} | layer_weights | key.\d+.weight | value.\d+.(weight|bias)
    | memory_norm(.weight|.bias)? | layers.\d+.(query.weight | output.(weight|bias))
    | layers.\d+.(content_bias | position_(keys|scores) | span_ratio)
"""
"""Parameters that loops and reader know, see :func:`memspan.models.packing.schema_of`."""


@dataclass(frozen=True, repr=False)
class FeedbackMemory(Memory):
    """The memory vectors of the last ``S`` tokens, one per token for all layers, newest right-most."""

    vectors: Tensor
    """``[B, S, D]``; empty slots are zero."""
    length: Tensor
    """Valid slots per row, int64 ``[B]``, counted from the right."""

    def slots(self) -> dict[str, int]:
        return {"length": self.vectors.shape[1]}


@known("config")
class Feedback(FeedbackStep, Backbone[FeedbackMemory]):
    """The stack over vectors: ``[B, T, D]`` and a memory in, ``[B, T, D]`` and a memory out.

    The span ``S`` is the number of slots in the memory. Trained weights work with a smaller span,
    ``initial_memory(batch_size, memory_length=...)``, or a larger one, up to the position table's rows.

    Gradients flow through all memory vectors of a segment and into the memory that is passed in:
    training code calls ``memory.detach()`` between segments.
    """

    memory_type = FeedbackMemory
    knows_documents = True
    implementations = ("reference", *IMPLEMENTATIONS)
    config: FeedbackConfig
    tables = ("position_keys", "position_scores")

    def __init__(self, config: FeedbackConfig) -> None:
        check_config(self, config, "FeedbackConfig")
        super().__init__(config)
        inner = config.n_heads * config.head_width
        groups = 1 if config.projections == "shared" else config.n_layers
        self.dropout = dropout_layer(config.dropout)
        self.layers = nn.ModuleList(FeedbackLayer(config) for _ in range(config.n_layers))
        self.key = nn.ModuleList(
            nn.Linear(config.d_model, inner, bias=False) for _ in range(groups)
        )
        self.value = nn.ModuleList(
            nn.Linear(config.d_model, inner, bias=config.has_value_bias) for _ in range(groups)
        )
        norm = partial(nn.LayerNorm, config.d_model)
        pre = config.normalisation == "pre"
        self.memory_norm = norm() if pre and config.memory_norm else nn.Identity()
        learned = config.memory_vector == "learned"
        self.layer_weights = nn.Parameter(first_layer_weights(config)) if learned else None
        self.final_norm = norm() if pre and config.final_norm else nn.Identity()
        initialise(self, config.initialisation, config.n_layers)
        self.schema = schema_of(self, PARTS)

    def units(self) -> list[nn.Module]:
        """Empty: the loop over tokens uses the parameters of all layers at once."""
        return []

    @property
    def dtype(self) -> torch.dtype:
        return next(self.stack()).content_bias.dtype

    def row_sizes(self) -> Mapping[str, tuple[int | None, ...]]:
        """See :meth:`Backbone.row_sizes`: any number of slots."""
        return {"vectors": (None, self.config.d_model)}

    def own_memory(self, memory: FeedbackMemory | None, rows: int) -> FeedbackMemory:
        """See :meth:`Backbone.own_memory`. The position table limits the span."""
        memory = super().own_memory(memory, rows)
        self._check_span(memory.vectors.shape[1])
        return memory

    def initial_memory(
        self,
        batch_size: int,
        memory_length: int | None = None,
        start: Literal["empty", "zeros"] = "empty",
    ) -> FeedbackMemory:
        """A memory before the first token.

        Args:
            batch_size: rows, B.
            memory_length: the span, S (None: as configured).
            start: ``empty``: there is nothing to attend to. ``zeros``: the first tokens attend to S
                all-zero memory vectors, as in the authors' code. Rows that are reset, and documents,
                begin empty either way.

        Raises:
            MemspanError: the span is 0, or exceeds the position table.
        """
        span = self.config.memory_length if memory_length is None else memory_length
        self._check_span(span)
        weight = next(self.stack()).content_bias
        counts = torch.zeros(batch_size, dtype=torch.long, device=weight.device)
        return FeedbackMemory(
            tokens_seen=counts,
            vectors=zeros_for(weight, batch_size, span, self.config.d_model),
            length=counts + span * (start == "zeros"),
        )

    def forward(
        self,
        x: Tensor,
        memory: FeedbackMemory | None = None,
        *,
        starts: Tensor | None = None,
        lengths: Tensor | None = None,
        padding: Padding = "right",
        implementation: str | None = None,
    ) -> BackboneOutput[FeedbackMemory]:
        """Read a segment, see :meth:`memspan.models.Backbone.forward`.

        Args:
            implementation: ``reference``, the loop over tokens and layers; ``fused``, the same loop as
                one autograd function of the weights, without learned spans; ``compiled``, that function
                with its loops in C, on a CPU; ``graph``, ``fused`` in CUDA graphs. None: the first of
                ``compiled`` and ``fused`` that can run, or the reference where modules are not exactly
                those that the backbone was made with.

        Raises:
            MemspanError: the memory has other sizes; the implementation does not exist or cannot run.
        """
        refuse_unknown_implementation(implementation, self.implementations)
        before = self.initial_memory(x.shape[0]) if memory is None else memory
        read: Any = partial(self.read_piece, implementation=implementation, is_empty=memory is None)
        out = read_whole(read, x, before, starts, lengths, padding)
        return replace(out, auxiliary_loss=self.span_penalty()) if x.numel() else out

    def read_piece(
        self,
        x: Tensor,
        memory: FeedbackMemory,
        implementation: str | None,
        documents: Documents | None = None,
        is_empty: bool = False,
    ) -> BackboneOutput[FeedbackMemory]:
        """See :meth:`Backbone.read_piece`. ``is_empty``: no slot of the memory is in use; to find that
        out would wait for a device, or break a compiled graph."""
        fuses = self.can_fuse() and self.is_as_made()
        if implementation in IMPLEMENTATIONS and not fuses:
            raise MemspanError(
                f"the {implementation} implementation supports neither adaptive spans nor changed "
                "modules, such as hooks and adapters: drop them, or use the reference"
            )
        if documents is not None and documents.begins is not None:
            # What is not finite must not stay: a weight of 0 times NaN is NaN.
            memory = memory.reset(documents.begins[:, 0])
        n_old, rows_alike = (0, True) if is_empty else _slots_in_use(memory)
        x = self.dropout(x)
        visible = None
        if documents is not None or not rows_alike:
            visible = tokens_seen_by(x, memory.length, documents)
        if implementation == "reference" or not fuses:
            h, vectors = self._reference(x, memory, visible, self._draw(x, memory, n_old))
        else:
            h, vectors = self.through(self._fused, x, memory, n_old, visible, implementation)
        return BackboneOutput(
            self.final_norm(h), _memory_after(memory, vectors, documents), h.new_zeros(())
        )

    def span_penalty(self) -> Tensor:
        """The penalty on learned spans, a scalar: ``adaptive_span`` times the spans in tokens, averaged
        over heads and summed over layers; 0 without learned spans."""
        penalty = zeros_for(next(self.stack()).content_bias)
        for layer in self.stack():
            if layer.span_ratio is not None:
                spans = layer.longest_span * layer.span_ratio.clamp(min=0)
                penalty = penalty + (self.config.adaptive_span or 0.0) * spans.mean()
        return penalty

    def _draw(self, x: Tensor, memory: FeedbackMemory, n_old: int) -> Dropout | None:
        """Draw the dropout of the segment ``x`` (None: nothing is dropped)."""
        config = self.config
        sizes = (self.config.n_layers, self.config.n_heads, self.config.d_ff)
        if not self.training or not (config.dropout or config.attention_dropout):
            return None
        n_slots = min(memory.vectors.shape[1], n_old + x.shape[1] - 1)
        return draw(x, *sizes, n_slots, config.dropout, config.attention_dropout)

    def _reference(
        self,
        x: Tensor,
        memory: FeedbackMemory,
        visible: Tensor | None = None,
        kept: Dropout | None = None,
        attention_weights: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The paper's loop over tokens: outputs and memory vectors, ``[B, T, D]`` each.

        ``visible``: of :func:`tokens_seen_by`, without documents by default. ``kept``: by dropout.
        ``attention_weights``: a list that receives each token's weights, layer after layer.
        """
        span = memory.vectors.shape[1]
        counts = tokens_seen_by(x, memory.length) if visible is None else visible
        mix = self.mix()
        # Keys and values of each earlier token.
        past = [self.project(m) for m in memory.vectors.to(x.dtype).unbind(1)]
        masks = [layer.span_mask() for layer in self.stack()]
        factors = NO_DROPOUT if kept is None else kept.factors(self.dtype)
        heads = self.config.n_heads
        outputs = []
        vectors = []

        def read(t: int, x_t: Tensor, past: list[Projected]) -> tuple[Tensor, Tensor, Projected]:
            slots = newest_slots(span, counts[:, t])
            kept_here = [factors.of_token(n, t, heads) for n in range(len(self.layers))]
            return self.step(x_t, past, slots, mix, masks, kept_here, attention_weights)

        for t, x_t in enumerate(x.unbind(1)):
            out, vector, projected = self.through(read, t, x_t, past[-span:])
            past.append(projected)
            outputs.append(out)
            vectors.append(vector)
        return torch.stack(outputs, 1), torch.stack(vectors, 1)

    def _fused(
        self,
        x: Tensor,
        memory: FeedbackMemory,
        n_old: int,
        visible: Tensor | None,
        implementation: str | None,
    ) -> tuple[Tensor, Tensor]:
        """The same as :meth:`_reference`, by one function over the whole segment."""
        span = memory.vectors.shape[1]
        return feedback_recurrence(
            x.to(self.dtype),
            memory.vectors[:, span - n_old :].to(self.dtype),
            visible,
            span,
            self.fold(span),
            activation=self.config.activation,
            eps=next(self.stack()).attention_norm.eps,
            kept=self._draw(x, memory, n_old),
            implementation=implementation,
        )

    def can_fuse(self) -> bool:
        """True if the fused implementation can compute these options."""
        return self.config.adaptive_span is None

    def float32_part(self) -> str | None:
        """The part that is computed in float32 even under bfloat16 autocast, in words (None: none)."""
        fast = self.can_fuse() or not self.training
        return "the Feedback Transformer's loop over tokens is computed" if fast else None

    def fold(self, span: int) -> FoldedWeights:
        """The weights as the fused implementation takes them, for a span of ``span`` tokens."""
        with torch.autocast(self.device.type, enabled=False):
            return fold(self, span)

    def taken_from(self, source: Backbone[Memory]) -> dict[str, Tensor] | None:
        """The weights of softmax attention with relative positions.

        Queries, outputs, feed-forwards and norms mean the same here. Keys and values are taken where
        each layer has its own projection; a shared one keeps its initial weights. Distance 0 is left
        out, since a token does not attend to itself.
        """
        given = source.transferable_weights(torch.arange(1, self.config.table_rows + 1))
        if given is None:
            return None
        config = self.config
        if (config.n_heads, config.head_width) != (given.n_heads, given.head_width):
            raise MemspanError(
                f"the source has {given.n_heads} heads of {given.head_width} and this model "
                f"{config.n_heads} of {config.head_width}: set --model.n-heads and --model.d-head alike"
            )
        taken = {f"final_norm.{name}": tensor for name, tensor in given.final_norm.items()}
        for n, weights in enumerate(given.layers[: len(self.layers)]):
            for name, tensor in weights.items():
                kind, _, part = name.partition(".")
                if kind not in ("key", "value"):
                    taken[f"layers.{n}.{name}"] = tensor
                elif len(self.key) > 1:
                    taken[f"{kind}.{n}.{part}"] = tensor
        return taken

    def compiled_loops(self) -> bool:
        """True if the loop over tokens can run in C here."""
        return feedback_loop.available(next(self.stack()).content_bias)

    @torch.no_grad()
    def attention_weights(self, x: Tensor, memory: FeedbackMemory) -> AttentionWeights:
        """See :meth:`Backbone.attention_weights`. The only kind is ``memory``: a token reaches earlier
        tokens, even of its own segment, through their memory vectors."""
        weights: list[Tensor] = []
        self._reference(x, memory, attention_weights=weights)
        n_layers = len(self.layers)
        span = memory.vectors.shape[1]
        slot = torch.arange(span, device=x.device)
        return AttentionWeights(
            [torch.stack(weights[n::n_layers], 2) for n in range(n_layers)],
            distances=(span - slot).float()[None, None],
            kinds={"memory": (slot >= 0)[None]},
        )

    def reader_type(self) -> type[BackboneReader[FeedbackMemory]]:
        """Its readers cache the keys and values of memory."""
        from memspan.models.feedback.reader import FeedbackReader

        return FeedbackReader

    def _check_span(self, span: int) -> None:
        if span < 1:
            raise MemspanError(f"memory_length must be at least 1, not {span}")
        if span > self.config.table_rows:
            raise MemspanError(
                f"a span of {span} tokens does not fit the position table of "
                f"{self.config.table_rows} rows: set memory_length to at most "
                f"{self.config.table_rows}"
            )


def _slots_in_use(memory: FeedbackMemory) -> tuple[int, bool]:
    """The most valid slots of any row, and true if each row has as many; all slots, and false, where
    counting would wait for the device."""
    if not can_look(memory.length):
        return memory.vectors.shape[1], False
    lengths = memory.length.tolist()
    return max(lengths, default=0), min(lengths, default=0) == max(lengths, default=0)


def tokens_seen_by(x: Tensor, length: Tensor, documents: Documents | None = None) -> Tensor:
    """Count the tokens of its document before each token of ``x [B, T, D]``, in the segment and in a
    memory of ``length [B]`` slots: int64 ``[B, T]``. Padding sees none."""
    if documents is None:
        return length[:, None] + torch.arange(x.shape[1], device=length.device)
    return documents.tokens_before(length).where(documents.own(), 0)


def newest_slots(span: int, counts: Tensor) -> Tensor:
    """Bool ``[B, S]``, true at each row's newest ``counts [B]`` of ``S`` slots."""
    return torch.arange(span, device=counts.device) >= span - counts[:, None]


def _memory_after(
    memory: FeedbackMemory, vectors: Tensor, documents: Documents | None
) -> FeedbackMemory:
    """The memory after a segment whose tokens have the ``vectors [B, T, D]``."""
    span = memory.vectors.shape[1]
    n_new = vectors.shape[1]
    before = memory.vectors.to(vectors.dtype)
    length = count_after(memory.length, n_new, documents).clamp(max=span)
    if documents is None:
        newest = torch.cat([before[:, n_new:], vectors[:, max(0, n_new - span) :]], 1)
    else:
        newest = documents.newest(torch.cat([before, vectors], 1), span)
        newest = without_padding(newest, newest_slots(span, length))
    return FeedbackMemory(
        tokens_seen=count_after(memory.tokens_seen, n_new, documents),
        vectors=newest,
        length=length,
    )
