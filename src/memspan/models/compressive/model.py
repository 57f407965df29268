"""Compressive Transformer (Rae et al. 2019, arXiv 1911.05507): its memory, layer and stack.

Layer ``n`` attends to ``[compressed_n ; memory_n ; h_n]``. What leaves ``memory_n`` is not thrown away,
as in Transformer-XL, but compressed by the layer's own function, ``c`` slots into one, and kept in
``compressed_n``: ``M + C`` slots reach ``M + c C`` tokens back in every layer.
Options: :class:`~memspan.models.CompressiveConfig`. Layout and compression functions:
:mod:`memspan.models.compressive.compression`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memspan.errors import MemspanError
from memspan.memory import Memory
from memspan.models.compressive import compression as ops
from memspan.models.compressive.config import CompressiveConfig
from memspan.models.compressive.layer import (
    Compression,
    Step,
    compress,
    frozen_keys_and_values,
    in_one_row,
)
from memspan.models.packing import schema_of
from memspan.models.protocol import AttentionWeights, BackboneReader
from memspan.models.relative.backbone import PARTS, RelativeBackbone
from memspan.models.relative.self_attention import AttentionPass, RelativeLayer, newest
from memspan.models.segments import Documents, count_after, padding_mask
from memspan.nn import in_use, known, where_in_use
from memspan.trees import check_config

COMPRESSIVE_PARTS = rf"""{PARTS}
    | layers.\d+.compression(.(decoder_)?(weight|bias))?
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


@known("pre")
class StackedLayer(RelativeLayer):
    """Attention over both memories and the segment, the feed-forward sub-layer, the compression."""

    def __init__(self, config: CompressiveConfig) -> None:
        super().__init__(config)
        self.compression = Compression(config) if config.compressed_length else None
        self.config = config

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        memory: Tensor,
        compressed: Tensor,
        step: Step,
        shared: AttentionPass,
        biases: tuple[Tensor, Tensor | None],
        counts: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Read ``x [B, T, D]`` after ``memory [B, C+M, D]``, both in one row, and ``compressed`` alone,
        ``[B, C, D]``: the output, the new compressed memory, the auxiliary loss, and, if it ``counts``
        it, the attention that each slot received, ``[B, C+M+T]``."""
        q, k, v = self.project(x, memory)
        context = torch.cat([memory, x], 1)
        received = x.new_zeros(context.shape[:2]) if counts else None
        attended = self.attention.attend(q, k, v, shared, biases, received)
        compressed, loss = compress(
            self.config,
            self.compression,
            self.attention,
            self.input_norm,
            context,
            compressed,
            step,
            (q, k, v),
            received,
            shared.implementation,
        )
        return self.residual(x, attended), compressed, loss, received

    def reconstruction_loss(self, x: Tensor, old: Tensor, received: Tensor | None = None) -> Tensor:
        """``|| attn(x, old) - attn(x, f_c(old)) ||^2`` (algorithm 2) by itself, a scalar.

        Its gradient reaches the compression function and nothing else.

        Args:
            x: this layer's inputs that attend, ``[B, T, D]``.
            old: slots to compress as memory holds them, un-normalised, ``[B, n*c, D]``.
            received: the attention that they received, ``[B, n*c]``, for most-used.
        """
        if self.compression is None:
            raise MemspanError("nothing is compressed with compressed_length 0: set it to more")
        with torch.no_grad():
            q, *old_kv = self.project(x, old)
        new = self.compression(old.detach(), received)
        new_kv = frozen_keys_and_values(self.attention, self.input_norm, new)
        every = torch.ones(new.shape[:2], dtype=torch.bool, device=new.device)
        k, v = (t[:, :, : old.shape[1]] for t in old_kv)
        return ops.attention_reconstruction(q, k, v, *new_kv, every)


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
        super().__init__(config, (StackedLayer(config) for _ in range(config.n_layers)))
        for layer in self.stack():
            if layer.compression is not None:
                layer.compression.initialise()
        self.schema = schema_of(self, COMPRESSIVE_PARTS)

    def stack(self) -> Iterator[StackedLayer]:
        """The layers, first to last."""
        return iter(self.layers)  # type: ignore[arg-type]

    def auxiliary_parameters(self) -> list[nn.Parameter]:
        """What the auxiliary loss trains."""
        layers = [layer.compression for layer in self.stack()]
        return [p for c in layers if c is not None for p in c.parameters()]

    def row_sizes(self) -> Mapping[str, tuple[int | None, ...]]:
        """See :meth:`Backbone.row_sizes`: any number of slots of each kind; compressed ones only where
        something compresses."""
        layers, width = len(self.layers), self.config.d_model
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
            compressed_length: compressed slots, C (None: as configured); likewise.
            start: ``empty``, nothing to attend to; ``zeros``, M and C all-zero slots that are attended.
                Rows that are reset, and documents, begin empty either way.
        """
        config = self.config
        slots = config.memory_length if memory_length is None else memory_length
        compressed = config.compressed_length if compressed_length is None else compressed_length
        config.check_memory_length(slots)
        weight = self.content_bias
        counts = torch.zeros(batch_size, dtype=torch.long, device=weight.device)
        sizes = (batch_size, config.n_layers)
        return CompressiveMemory(
            tokens_seen=counts,
            hidden=weight.new_zeros(*sizes, slots, config.d_model),
            compressed=weight.new_zeros(*sizes, compressed, config.d_model),
            length=counts + slots * (start == "zeros"),
            compressed_length=counts + compressed * (start == "zeros"),
        )

    def read_layers(
        self, h: Tensor, memory: CompressiveMemory, shared: AttentionPass, run: Callable[..., Any]
    ) -> tuple[Tensor, CompressiveMemory, Tensor, dict[str, Tensor]]:
        """See :meth:`RelativeBackbone.read_layers`. Of several documents in a row only the last, of
        which something is kept, is compressed and has an auxiliary loss.

        Statistics are per layer the auxiliary loss and, in evaluation mode but not with ``sdpa``, the
        shares of attention on compressed slots, memory and segment.
        """
        context, n_tokens, documents = in_one_row(memory), h.shape[1], shared.documents
        step = Step.of(memory, n_tokens, self.config.compression_rate, documents)
        length, compressed_length = step.after.length, step.after.compressed_length
        wants_shares = not self.training and shared.implementation != "sdpa"
        counts = wants_shares or self.config.needs_received
        hidden, compressed, losses, shares = [], [], [], []
        for n, layer in enumerate(self.stack()):
            old, older = context[:, n].to(h.dtype), memory.compressed[:, n].to(h.dtype)
            # Of a long segment nothing else is kept.
            hidden.append(where_in_use(newest(old[:, older.shape[1] :], h, documents), length))
            given = (h, old, older, step, shared, self.biases(n), counts)
            h, older, loss, received = run(layer, *given)
            compressed.append(older)
            losses.append(loss)
            if not self.training and received is not None:
                shares.append(_shares(received, memory.length, n_tokens, documents))
        after = CompressiveMemory(
            tokens_seen=count_after(memory.tokens_seen, n_tokens, documents),
            hidden=torch.stack(hidden, 1),
            compressed=where_in_use(torch.stack(compressed, 1), compressed_length),
            length=length,
            compressed_length=compressed_length,
        )
        by_layer = torch.stack(losses)
        return h, after, by_layer.sum(), _statistics(by_layer, shares)

    @torch.no_grad()
    def attention_weights(self, x: Tensor, memory: CompressiveMemory) -> AttentionWeights:
        """See :meth:`Backbone.attention_weights`; kinds are ``compressed``, ``memory`` and ``segment``.

        A compressed slot stands for the middle of the tokens that were compressed into it.
        """
        layers: list[Tensor] = []
        self(x, memory, implementation="reference", attention_weights=layers)
        slots, rate = sum(memory.slots().values()), self.config.compression_rate
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
