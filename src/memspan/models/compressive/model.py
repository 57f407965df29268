"""Compressive Transformer (Rae et al. 2019, arXiv 1911.05507): the stack of its layers, and the memory
of all.

Layer ``n`` attends to ``[compressed_n ; memory_n ; h_n]``. What leaves ``memory_n`` is not thrown away,
as in Transformer-XL, but compressed by the layer's own function, ``c`` slots into one, and kept in
``compressed_n``: ``M + C`` slots reach ``M + c C`` tokens back in every layer. One layer is in
:mod:`memspan.models.compressive.layer`. Options: :class:`~memspan.models.CompressiveConfig`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from memspan.memory import Memory
from memspan.models.compressive.config import CompressiveConfig
from memspan.models.compressive.layer import (
    CompressiveLayer,
    CompressiveLayerMemory,
    CompressivePass,
    Step,
)
from memspan.models.defaults import AttentionWeights
from memspan.models.known import known
from memspan.models.output import BackboneOutput
from memspan.models.packing import schema_of
from memspan.models.readers import BackboneReader
from memspan.models.relative.attention import Span, seen_by
from memspan.models.relative.backbone import PARTS, RelativeBackbone
from memspan.models.segments import Documents, Padding, documents_of, padding_mask
from memspan.nn import count_after, in_use
from memspan.trees import check_config, zeros_for

COMPRESSIVE_PARTS = rf"""{PARTS}
    | layers.\d+.attention.compression(.(decoder_)?(weight|bias))?
"""


@dataclass(frozen=True, repr=False)
class CompressiveMemory(Memory):
    """Inputs of every layer, un-normalised, newest right-most: the last ones as they were, older ones
    compressed.

    A slot is valid if fewer than the row's count stand to its right, and zero else. Every row counts
    its own tokens, so after a reset it is laid out as a fresh one, whatever the other rows do.
    """

    hidden: Tensor
    """``[B, L, M, D]``."""
    compressed: Tensor
    """``[B, L, C, D]``; each slot stands for c tokens."""
    length: Tensor
    """Valid slots of ``hidden``, int64 ``[B]``: between ``M - c + 1`` and ``M`` once full."""
    compressed_length: Tensor
    """Valid slots of ``compressed``, int64 ``[B]``."""

    def slots(self) -> dict[str, int]:
        return {"length": self.hidden.shape[2], "compressed_length": self.compressed.shape[2]}

    def layers(self) -> list[CompressiveLayerMemory]:
        """The memory of each layer, first to last."""
        own = zip(self.hidden.unbind(1), self.compressed.unbind(1), strict=True)
        counts = self.length, self.compressed_length
        return [CompressiveLayerMemory(*slots, *counts) for slots in own]


@known("config")
class Compressive(RelativeBackbone[CompressiveMemory]):
    """The stack over vectors: ``[B, T, D]`` and a memory in, ``[B, T, D]`` and a memory out.

    The sizes ``M`` and ``C`` are the memory's own, so other ones may be used with the same weights:
    ``initial_memory(batch_size, memory_length=..., compressed_length=...)``.

    ``auxiliary_loss`` of the output trains the compression functions and nothing else; the task's
    loss trains all but them, unless ``task_gradient`` is set.

    Differs from the paper: pre-norm by default; gradients never pass through what is compressed to
    the layers that computed it.
    """

    memory_type = CompressiveMemory
    config: CompressiveConfig

    def __init__(self, config: CompressiveConfig) -> None:
        check_config(self, config, "CompressiveConfig")
        super().__init__(config, (CompressiveLayer(config) for _ in range(config.n_layers)))
        for layer in self.stack():
            if layer.attention.compression is not None:
                layer.attention.compression.initialise()
        self.schema = schema_of(self, COMPRESSIVE_PARTS)

    def stack(self) -> Iterator[CompressiveLayer]:
        """The layers, first to last."""
        return iter(self.layers)  # type: ignore[arg-type]

    def auxiliary_parameters(self) -> list[nn.Parameter]:
        """The parameters that the auxiliary loss trains."""
        compressions = [layer.attention.compression for layer in self.stack()]
        return [p for c in compressions if c is not None for p in c.parameters()]

    def row_sizes(self) -> Mapping[str, tuple[int | None, ...]]:
        """See :meth:`Backbone.row_sizes`: any number of slots of each kind; compressed ones only where
        something compresses."""
        layers = len(self.layers)
        width = self.config.d_model
        compressed = None if self.config.compressed_length else 0
        return {"hidden": (layers, None, width), "compressed": (layers, compressed, width)}

    def cut_invariant(self) -> bool:
        return False

    def initial_memory(
        self,
        batch_size: int,
        memory_length: int | None = None,
        compressed_length: int | None = None,
        start: Literal["empty", "zeros"] = "empty",
    ) -> CompressiveMemory:
        """A memory before the first token.

        Args:
            batch_size: rows, B.
            memory_length: slots of memory, M (None: as configured); may differ from training's.
            compressed_length: compressed slots, C (None: as configured); may differ from training's.
            start: ``empty``, nothing to attend to; ``zeros``, M and C all-zero slots that are attended.
                Rows that are reset, and documents, begin empty either way.
        """
        config = self.config
        slots = config.memory_length if memory_length is None else memory_length
        compressed = config.compressed_length if compressed_length is None else compressed_length
        config.check_memory_length(slots)
        weight = self.one_weight
        counts = torch.zeros(batch_size, dtype=torch.long, device=weight.device)
        sizes = (batch_size, config.n_layers)
        return CompressiveMemory(
            tokens_seen=counts,
            hidden=zeros_for(weight, *sizes, slots, config.d_model),
            compressed=zeros_for(weight, *sizes, compressed, config.d_model),
            length=counts + slots * (start == "zeros"),
            compressed_length=counts + compressed * (start == "zeros"),
        )

    def forward(
        self,
        x: Tensor,
        memory: CompressiveMemory | None = None,
        *,
        starts: Tensor | None = None,
        lengths: Tensor | None = None,
        padding: Padding = "right",
        implementation: str | None = None,
        attention_weights: list[Tensor] | None = None,
        span: Span | None = None,
    ) -> BackboneOutput[CompressiveMemory]:
        """Read a segment, see :meth:`memspan.models.Backbone.forward`. If a row holds several
        documents, only the last is kept, so only it is compressed and adds an auxiliary loss.

        Statistics are per layer the auxiliary loss and, in evaluation mode but not with ``sdpa``, the
        shares of attention on compressed slots, memory and segment.

        Args:
            implementation: of :func:`memspan.ops.relative.relative_attention`.
            attention_weights: a list that receives each layer's weights, ``[B, H, T, C + M + T]`` over
                compressed slots, memory and segment, a row's valid slots side by side and right-most;
                before dropout and without gradient, for inspection. Left padding counts as right
                padding in it.
            span: the keys and distances that are told apart (None: as configured).

        Raises:
            MemspanError: no such implementation; a learned position table is too short.
        """
        memory = self.initial_memory(x.shape[0]) if memory is None else memory
        span = self.span() if span is None else span
        slots = sum(memory.slots().values())
        n_tokens = x.shape[1]
        x, documents = documents_of(x, starts, lengths, padding)
        used = memory.length + memory.compressed_length
        limits = span.visible(used, n_tokens, slots, slots, documents)
        wants_shares = not self.training and implementation not in ("sdpa", "triton")
        shared = CompressivePass(
            codes=self.codes(span, slots, n_tokens),
            mask=seen_by(implementation, limits, slots + n_tokens),
            implementation=implementation,
            weights=attention_weights,
            documents=documents,
            step=Step.of(memory, n_tokens, self.config.compression_rate, documents),
            counts=wants_shares or self.config.needs_received,
        )
        h = self.dropout(x)
        after = []
        losses = []
        shares = []
        for layer, before in zip(self.stack(), memory.layers(), strict=True):
            h, own, loss, received = self.run(layer, h, before, shared)
            after.append(own)
            losses.append(loss)
            if not self.training and received is not None:
                shares.append(_shares(received, memory.length, n_tokens, documents))
        hidden = self.final_norm(h)
        hidden = hidden if documents is None else documents.put_back(hidden)
        memory = CompressiveMemory(
            tokens_seen=count_after(memory.tokens_seen, n_tokens, documents),
            hidden=torch.stack([own.hidden for own in after], 1),
            compressed=torch.stack([own.compressed for own in after], 1),
            length=shared.step.after.length,
            compressed_length=shared.step.after.compressed_length,
        )
        by_layer = torch.stack(losses)
        return BackboneOutput(hidden, memory, by_layer.sum(), _statistics(by_layer, shares))

    @torch.no_grad()
    def attention_weights(self, x: Tensor, memory: CompressiveMemory) -> AttentionWeights:
        """See :meth:`Backbone.attention_weights`; kinds are ``compressed``, ``memory`` and ``segment``.

        A compressed slot stands for the middle of the tokens that were compressed into it.
        """
        layers: list[Tensor] = []
        self(x, memory, implementation="reference", attention_weights=layers)
        slots = sum(memory.slots().values())
        rate = self.config.compression_rate
        # Slots and tokens before the segment's first token; from it on, 0 and less.
        back = torch.arange(slots, -x.shape[1], -1, device=x.device)[None]
        length = memory.length[:, None]
        compressed = back > length
        middle = length + (back - length - 1) * rate + (rate + 1) / 2
        tokens_back = torch.where(compressed, middle, back.float())
        return AttentionWeights(
            layers,
            distances=tokens_back[:, None] - back[:, slots:, None],
            kinds={
                "compressed": compressed,
                "memory": (back > 0) & ~compressed,
                "segment": back <= 0,
            },
        )

    def reader_type(self) -> type[BackboneReader[CompressiveMemory]]:
        from memspan.models.compressive.reader import CompressiveReader

        return CompressiveReader


def _statistics(losses: Tensor, shares: list[Tensor]) -> dict[str, Tensor]:
    """Per layer: the auxiliary ``losses [L]`` and, where they were counted, attention's ``shares``."""
    names = ("attention_compressed", "attention_memory", "attention_segment") if shares else ()
    parts = torch.stack(shares, 1) if shares else ()
    return {"auxiliary_loss": losses.detach(), **dict(zip(names, parts, strict=True))}


def _shares(received: Tensor, length: Tensor, n_tokens: int, documents: Documents | None) -> Tensor:
    """Shares of the attention on compressed slots, memory and segment: ``[B, S] -> [3]``."""
    old, segment = received.split([received.shape[1] - n_tokens, n_tokens], 1)
    if documents is not None:
        segment = segment.where(padding_mask(documents.lengths, n_tokens), 0)
    memory = old.where(in_use(old.shape[1], length), 0).sum()
    parts = torch.stack([old.sum() - memory, memory, segment.sum()])
    # 0 where nothing was read.
    return parts / parts.sum().clamp(min=torch.finfo(parts.dtype).tiny)
