"""Transformer-XL (Dai et al. 2019, arXiv 1901.02860): its memory, its layer and its stack.

Layer ``n`` attends to ``[memory_n ; h_n]``, where ``memory_n`` holds that layer's last ``M`` inputs.
Options: :class:`~memspan.models.TransformerXLConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from memspan.memory import Memory
from memspan.models.packing import schema_of
from memspan.models.protocol import AttentionWeights
from memspan.models.relative.backbone import PARTS, RelativeBackbone
from memspan.models.relative.self_attention import AttentionPass, RelativeLayer, Span, newest
from memspan.models.segments import count_after
from memspan.models.transformer_xl.config import TransformerXLConfig
from memspan.nn import known, where_in_use
from memspan.trees import check_config

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
        epsilon = config.norm_epsilon
        layers = (RelativeLayer(config, epsilon) for _ in range(config.n_layers))
        super().__init__(config, layers, epsilon)
        self.schema = schema_of(self, PARTS)

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
        weight = self.content_bias
        counts = torch.zeros(batch_size, dtype=torch.long, device=weight.device)
        return TransformerXLMemory(
            tokens_seen=counts,
            hidden=weight.new_zeros(batch_size, len(self.layers), slots, self.config.d_model),
            length=counts + slots * (start == "zeros"),
        )

    def read_layers(
        self,
        h: Tensor,
        memory: TransformerXLMemory,
        shared: AttentionPass,
        run: Callable[..., Any],
    ) -> tuple[Tensor, TransformerXLMemory, Tensor, dict[str, Tensor]]:
        recent, documents = [], shared.documents
        for n, layer in enumerate(self.stack()):
            old = memory.hidden[:, n].to(h.dtype)
            recent.append(newest(old, h, documents))
            h = run(layer, h, old, shared, self.biases(n))
        hidden, n_tokens = torch.stack(recent, 1), h.shape[1]
        length = count_after(memory.length, n_tokens, documents).clamp(max=hidden.shape[2])
        after = TransformerXLMemory(
            tokens_seen=count_after(memory.tokens_seen, n_tokens, documents),
            # What an earlier document left is forgotten.
            hidden=hidden if documents is None else where_in_use(hidden, length),
            length=length,
        )
        return h, after, h.new_zeros(()), {}

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
