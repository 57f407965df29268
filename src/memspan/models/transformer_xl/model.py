"""Transformer-XL (Dai et al. 2019, arXiv 1901.02860): the stack of its layers, and the memory of all.

Layer ``n`` attends to ``[memory_n ; h_n]``, where ``memory_n`` holds that layer's last ``M`` inputs.
One layer is in :mod:`memspan.models.transformer_xl.layer`. Options:
:class:`~memspan.models.TransformerXLConfig`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from memspan.memory import Memory
from memspan.models.defaults import AttentionWeights
from memspan.models.known import known
from memspan.models.output import BackboneOutput
from memspan.models.packing import schema_of
from memspan.models.relative.attention import AttentionPass, Span, seen_by
from memspan.models.relative.backbone import PARTS, RelativeBackbone
from memspan.models.segments import Padding, documents_of, read_by_length
from memspan.models.transformer_xl.config import TransformerXLConfig
from memspan.models.transformer_xl.layer import TransformerXLLayer, TransformerXLLayerMemory
from memspan.nn import count_after
from memspan.trees import check_config, zeros_for

LONGEST_PIECE = 512
"""Tokens of a longer segment that are read at once with a fixed span."""


@dataclass(frozen=True, repr=False)
class TransformerXLMemory(Memory):
    """The last ``M`` inputs of every layer, un-normalised, newest right-most."""

    hidden: Tensor
    """``[B, L, M, D]``; empty slots are zero."""
    length: Tensor
    """Valid slots per row, int64 ``[B]``, counted from the right."""

    def slots(self) -> dict[str, int]:
        return {"length": self.hidden.shape[2]}

    def layers(self) -> list[TransformerXLLayerMemory]:
        """The memory of each layer, first to last."""
        return [TransformerXLLayerMemory(own, self.length) for own in self.hidden.unbind(1)]


@known("config")
class TransformerXL(RelativeBackbone[TransformerXLMemory]):
    """The stack over vectors: ``[B, T, D]`` and a memory in, ``[B, T, D]`` and a memory out.

    ``M`` is the memory's own size, so a memory of another length may be used with the same weights:
    ``initial_memory(batch_size, memory_length=...)``.

    Differs from the paper: nothing here stops the gradient at the memory. Whoever trains calls
    ``memory.detach()``, the paper's stop-gradient SG(.), between segments.
    """

    memory_type = TransformerXLMemory
    config: TransformerXLConfig

    def __init__(self, config: TransformerXLConfig) -> None:
        check_config(self, config, "TransformerXLConfig")
        layers = (TransformerXLLayer(config) for _ in range(config.n_layers))
        super().__init__(config, layers, config.norm_epsilon)
        self.schema = schema_of(self, PARTS)

    def stack(self) -> Iterator[TransformerXLLayer]:
        """The layers, first to last."""
        return iter(self.layers)  # type: ignore[arg-type]

    def row_sizes(self) -> Mapping[str, tuple[int | None, ...]]:
        """See :meth:`Backbone.row_sizes`: any number of slots."""
        return {"hidden": (len(self.layers), None, self.config.d_model)}

    def longest_piece(self, span: Span, slots: int) -> int | None:
        """See :meth:`RelativeBackbone.longest_piece`: with a fixed span, cuts change nothing."""
        return max(LONGEST_PIECE, slots) if span.attention == "fixed" else None

    def cut_invariant(self) -> bool:
        return self.config.attention_span == "fixed"

    def initial_memory(
        self,
        batch_size: int,
        memory_length: int | None = None,
        start: Literal["empty", "zeros"] | None = None,
    ) -> TransformerXLMemory:
        """A memory before the first token.

        Args:
            batch_size: rows, B.
            memory_length: slots, M (None: as configured); may differ from training's.
            start: ``empty``, nothing to attend to; ``zeros``, M all-zero slots that are attended, as
                the checkpoints once distributed through transformers were trained and scored (None:
                as configured). Rows that are reset, and documents, begin empty either way.
        """
        slots = self.config.memory_length if memory_length is None else memory_length
        self.span().check_slots(slots)
        start = self.config.start if start is None else start
        weight = self.one_weight
        counts = torch.zeros(batch_size, dtype=torch.long, device=weight.device)
        return TransformerXLMemory(
            tokens_seen=counts,
            hidden=zeros_for(weight, batch_size, len(self.layers), slots, self.config.d_model),
            length=counts + slots * (start == "zeros"),
        )

    def forward(
        self,
        x: Tensor,
        memory: TransformerXLMemory | None = None,
        *,
        starts: Tensor | None = None,
        lengths: Tensor | None = None,
        padding: Padding = "right",
        implementation: str | None = None,
        attention_weights: list[Tensor] | None = None,
        span: Span | None = None,
    ) -> BackboneOutput[TransformerXLMemory]:
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
        slots = memory.hidden.shape[2]
        n_tokens = x.shape[1]
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
        limits = span.visible(memory.length, n_tokens, slots, slots, documents)
        shared = AttentionPass(
            codes=self.codes(span, slots, n_tokens),
            mask=seen_by(implementation, limits, slots + n_tokens),
            implementation=implementation,
            weights=attention_weights,
            documents=documents,
        )
        h = self.dropout(x)
        after = []
        for layer, before in zip(self.stack(), memory.layers(), strict=True):
            h, own = self.run(layer, h, before, shared)
            after.append(own)
        hidden = self.final_norm(h)
        hidden = hidden if documents is None else documents.put_back(hidden)
        memory = TransformerXLMemory(
            tokens_seen=count_after(memory.tokens_seen, n_tokens, documents),
            hidden=torch.stack([own.hidden for own in after], 1),
            length=after[-1].length,
        )
        return BackboneOutput(hidden, memory, h.new_zeros(()))

    @torch.no_grad()
    def attention_weights(self, x: Tensor, memory: TransformerXLMemory) -> AttentionWeights:
        """See :meth:`Backbone.attention_weights`; kinds are ``memory`` and ``segment``."""
        layers: list[Tensor] = []
        self(x, memory, implementation="reference", attention_weights=layers)
        slots = memory.hidden.shape[2]
        key = torch.arange(-slots, x.shape[1], device=x.device)
        return AttentionWeights(
            layers,
            distances=(key[slots:, None] - key).float()[None],
            kinds={"memory": (key < 0)[None], "segment": (key >= 0)[None]},
        )
