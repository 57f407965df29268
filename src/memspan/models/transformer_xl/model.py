"""Transformer-XL (Dai et al. 2019, arXiv 1901.02860): its memory, its layer and its stack.

Layer ``n`` attends to ``[memory_n ; h_n]``, where ``memory_n`` holds that layer's last ``M`` inputs.
Options: :class:`~memspan.models.TransformerXLConfig`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from memspan.memory import Memory
from memspan.models.output import BackboneOutput
from memspan.models.packing import schema_of
from memspan.models.protocol import AttentionWeights, BackboneReader
from memspan.models.relative.backbone import PARTS, RelativeBackbone
from memspan.models.relative.self_attention import AttentionPass, RelativeLayer, Span, newest
from memspan.models.segments import Documents, Padding, count_after, documents_of
from memspan.models.transformer_xl.config import TransformerXLConfig
from memspan.nn import in_use, known


@dataclass(frozen=True, repr=False)
class TransformerXLMemory(Memory):
    """The last ``M`` inputs of every layer, un-normalised, newest right-most."""

    hidden: Tensor
    """``[B, L, M, D]``; empty slots are zero."""
    length: Tensor
    """Valid slots per row, int64 ``[B]``, counted from the right."""

    def slots(self) -> dict[str, int]:
        return {"length": self.hidden.shape[2]}


@known("pre")
class StackedLayer(RelativeLayer):
    """Attention over memory and segment, then the feed-forward sub-layer."""

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        shared: AttentionPass,
        biases: tuple[Tensor, Tensor | None],
    ) -> Tensor:
        """Read ``x [B, T, D]`` after this layer's ``memory [B, M, D]``."""
        q, k, v = self.project(x, memory)
        attended = self.attention.attend(q, k, v, shared, biases)
        return self.residual(x, attended)


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
        epsilon = config.norm_epsilon
        layers = (StackedLayer(config, epsilon) for _ in range(config.n_layers))
        super().__init__(config, layers, epsilon)
        self.schema = schema_of(self, PARTS)

    def row_sizes(self) -> Mapping[str, tuple[int | None, ...]]:
        """See :meth:`Backbone.row_sizes`: any number of slots."""
        return {"hidden": (len(self.layers), None, self.config.d_model)}

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
        weight = self.content_bias
        counts = torch.zeros(batch_size, dtype=torch.long, device=weight.device)
        return TransformerXLMemory(
            tokens_seen=counts,
            hidden=weight.new_zeros(batch_size, len(self.layers), slots, self.config.d_model),
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
            attention_weights: a list that receives each layer's weights, ``[B, H, T, M + T]`` over
                ``[memory | segment]``, before dropout and without gradient; for inspection. Left
                padding counts as right padding in it.
            span: the keys and distances that are told apart (None: as configured).
        """
        if memory is None:
            memory = self.initial_memory(x.shape[0])
        x, documents = documents_of(x, starts, lengths, padding)
        slots, n_tokens = memory.hidden.shape[2], x.shape[1]
        shared = self.attention_pass(
            memory.length, n_tokens, slots, documents, implementation, attention_weights, span
        )
        h = self.dropout(x)
        # Recomputed layers would append their weights to the caller's list again.
        run = self.through if attention_weights is None else operator.call
        recent = []
        for n, layer in enumerate(self.stack()):
            old = memory.hidden[:, n].to(h.dtype)
            recent.append(newest(old, h, documents))
            h = run(layer, h, old, shared, self.biases(n))
        hidden = self.final_norm(h)
        memory = memory_after(memory, torch.stack(recent, 1), n_tokens, documents)
        if documents is not None:
            hidden = documents.put_back(hidden)
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

    def reader_type(self) -> type[BackboneReader[TransformerXLMemory]]:
        from memspan.models.transformer_xl.reader import TransformerXLReader

        return TransformerXLReader


def memory_after(
    before: TransformerXLMemory, recent: Tensor, n_tokens: int, documents: Documents | None
) -> TransformerXLMemory:
    """The memory whose last ``M`` columns are ``recent [B, L, M, D]``."""
    slots = recent.shape[2]
    length = count_after(before.length, n_tokens, documents).clamp(max=slots)
    if documents is not None:
        # What an earlier document left is forgotten.
        recent = recent.where(in_use(slots, length)[:, None, :, None], recent.new_zeros(()))
    return TransformerXLMemory(
        tokens_seen=count_after(before.tokens_seen, n_tokens, documents),
        hidden=recent,
        length=length,
    )
