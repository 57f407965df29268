"""Transformer-XL (Dai et al. 2019, arXiv 1901.02860): its memory, its layer, its stack, its reader.

Layer ``n`` attends to ``[memory_n ; h_n]``, where ``memory_n`` holds that layer's last ``M`` inputs.
Options: :class:`memspan.config.TransformerXLConfig`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memspan.config import TransformerXLConfig
from memspan.errors import MemspanError
from memspan.memory import Memory
from memspan.models.output import BackboneOutput
from memspan.models.relative_self_attention import RelativeSelfAttention, table_rows
from memspan.nn import FeedForward, dropout_layer, initialise, sinusoids
from memspan.ops.relative_attention import attend_one, relative_attention
from memspan.sizes import refuse_oversized_model


@dataclass(frozen=True)
class TransformerXLMemory(Memory):
    """The last ``M`` inputs of every layer, un-normalised, newest right-most."""

    hidden: Tensor
    """``[B, L, M, D]``; empty slots are zero."""
    length: Tensor
    """Valid slots per row, int64 ``[B]``, counted from the right."""

    def slots(self) -> dict[str, int]:
        return {"length": self.hidden.shape[2]}


class TransformerXLLayer(nn.Module):
    """Attention and feed-forward sub-layers, each with its residual and norm."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.pre = config.normalisation == "pre"
        self.attention = RelativeSelfAttention(
            config.d_model,
            config.n_heads,
            config.head_width,
            table_rows=table_rows(config.positions, config.max_distance),
            bias=config.attention_bias,
            dropout=config.attention_dropout,
        )
        self.feed_forward = FeedForward(
            config.d_model, config.d_ff, config.activation, config.dropout
        )
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)
        self.dropout = dropout_layer(config.dropout)

    def normalise_context(self, context: Tensor) -> Tensor:
        """What keys and values are computed from: with pre-norm, the normalised context."""
        return self.attention_norm(context) if self.pre else context

    def residual(self, x: Tensor, attended: Tensor) -> Tensor:
        """All that follows the attention."""
        if self.pre:
            x = x + self.dropout(attended)
            return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        x = self.attention_norm(x + self.dropout(attended))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        codes: Tensor,
        mask: Tensor,
        content_bias: Tensor,
        position_bias: Tensor | None,
    ) -> Tensor:
        """Read ``x [B, T, D]`` after this layer's ``memory [B, M, D]``."""
        q, k, v = self.attention.project(self.normalise_context(x), self.normalise_context(memory))
        attended = self.attention.attend(q, k, v, codes, mask, content_bias, position_bias)
        return self.residual(x, attended)


class TransformerXL(nn.Module):
    """The stack over vectors: ``[B, T, D]`` and a memory in, ``[B, T, D]`` and a memory out.

    ``M`` is the memory's own size, so a memory of another length may be used with the same weights:
    ``initial_memory(batch_size, memory_length=...)``.

    Differs from the paper: nothing here stops the gradient at the memory. Whoever trains calls
    ``memory.detach()``, the paper's stop-gradient SG(.), between segments.
    """

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        refuse_oversized_model(config)
        self.config = config
        self.dropout = dropout_layer(config.dropout)
        self.layers = nn.ModuleList(TransformerXLLayer(config) for _ in range(config.n_layers))
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
        initialise(self)

    def stack(self) -> Iterator[TransformerXLLayer]:
        """The layers, first to last, under their own type."""
        return iter(self.layers)  # type: ignore[arg-type]

    def biases(self, n: int) -> tuple[Tensor, Tensor | None]:
        """``u`` and ``v`` of layer ``n``, ``[H, K]`` each; ``v`` only with sinusoidal positions."""
        n = 0 if self.config.tie_position_biases else n
        return self.content_bias[n], None if self.position_bias is None else self.position_bias[n]

    def initial_memory(
        self,
        batch_size: int,
        memory_length: int | None = None,
        start: Literal["empty", "zeros"] = "empty",
    ) -> TransformerXLMemory:
        """A memory before the first token.

        Args:
            batch_size: rows, B.
            memory_length: slots, M (None: as configured); may differ from training's.
            start: ``empty``, nothing to attend to; ``zeros``, M all-zero slots that are attended, as
                the checkpoints once distributed through transformers were trained and scored.
        """
        slots = self.config.memory_length if memory_length is None else memory_length
        if slots < (self.config.attention_span == "fixed"):
            raise MemspanError(f"memory_length must be at least 1 for a fixed span, not {slots}")
        self._check_span(slots + 1, slots)
        weight = self.content_bias
        counts = torch.zeros(batch_size, dtype=torch.long, device=weight.device)
        return TransformerXLMemory(
            tokens_seen=counts,
            hidden=weight.new_zeros(batch_size, len(self.layers), slots, self.config.d_model),
            length=counts + slots * (start == "zeros"),
        )

    def forward(
        self, x: Tensor, memory: TransformerXLMemory | None = None
    ) -> BackboneOutput[TransformerXLMemory]:
        """Read a segment.

        Args:
            x: ``[B, T, D]``.
            memory: what was read before (None: nothing). It is not changed.
        """
        if memory is None:
            memory = self.initial_memory(x.shape[0])
        self._check_memory(memory, x)
        slots = memory.hidden.shape[2]
        codes = self.dropout_codes(self.position_codes(slots + x.shape[1], slots))
        mask = self.visible(memory.length, x.shape[1], slots)
        h = self.dropout(x)
        kept = []
        for n, layer in enumerate(self.stack()):
            old = memory.hidden[:, n].to(h.dtype)
            kept.append(torch.cat([old, h], 1)[:, old.shape[1] + h.shape[1] - slots :])
            h = layer(h, old, codes, mask, *self.biases(n))
        memory = TransformerXLMemory(
            tokens_seen=memory.tokens_seen + x.shape[1],
            hidden=torch.stack(kept, 1),
            length=(memory.length + x.shape[1]).clamp(max=slots),
        )
        return BackboneOutput(self.final_norm(h), memory, h.new_zeros(()))

    def reader(self, memory: TransformerXLMemory | None, batch_size: int) -> TransformerXLReader:
        """Reads on without gradients, keeping the keys and values of memory."""
        return TransformerXLReader(self, memory or self.initial_memory(batch_size))

    def visible(self, length: Tensor, n_queries: int, slots: int) -> Tensor:
        """Mask ``[B, T, M + T]``: valid memory and the segment's past, within the span."""
        query = torch.arange(slots, slots + n_queries, device=length.device)[:, None]
        key = torch.arange(slots + n_queries, device=length.device)
        mask = key <= query
        if self.config.attention_span == "fixed":
            mask = mask & (query - key < slots)
        return mask & (key >= slots - length[:, None, None])

    def position_codes(self, span: int, slots: int) -> Tensor:
        """Codes of the distances ``0 .. span-1``: sinusoids ``[S, D]`` or table rows ``int64 [S]``."""
        self._check_span(span, slots)
        distance = torch.arange(span, device=self.content_bias.device)
        limit = self._largest_code(span, slots)
        distance = distance.clamp(max=limit)
        if self.position_bias is None:
            return distance
        return sinusoids(distance, self.config.d_model, self.content_bias.dtype)

    def dropout_codes(self, codes: Tensor) -> Tensor:
        return self.dropout(codes) if codes.is_floating_point() else codes

    def _largest_code(self, span: int, slots: int) -> int:
        limit = span - 1
        if self.config.attention_span == "fixed":
            limit = min(limit, slots - 1)
        if self.config.clamp_length is not None:
            limit = min(limit, self.config.clamp_length)
        return limit

    def _check_span(self, span: int, slots: int) -> None:
        rows = self.config.max_distance
        needed = self._largest_code(span, slots) + 1
        if self.position_bias is None and rows is not None and needed > rows:
            raise MemspanError(
                f"a span of {needed} tokens, memory and segment together, exceeds the learned "
                f"position table of {rows} rows: lower --memory-length or --segment-length, or "
                "train with a larger --model.max-distance"
            )

    def _check_memory(self, memory: TransformerXLMemory, x: Tensor) -> None:
        wanted = (x.shape[0], len(self.layers), self.config.d_model)
        b, n, _, d = memory.hidden.shape
        if (b, n, d) != wanted:
            raise MemspanError(
                f"the memory is for (rows, layers, width) {(b, n, d)} and the input needs "
                f"{wanted}: use memory.select for rows, or this model's initial_memory"
            )


class TransformerXLReader:
    """Reads a stream without gradients; keys and values of memory are projected once and kept.

    With frozen weights a slot's keys and values never change, whichever the norm, so nothing is
    recomputed and the result equals the model's. They live in buffers with room to grow; when a
    buffer is full its last ``M`` columns move to a fresh one, so the cost per token is constant.
    """

    def __init__(self, backbone: TransformerXL, memory: TransformerXLMemory) -> None:
        self.backbone = backbone
        self.slots = memory.hidden.shape[2]
        self.length, self.tokens_seen = memory.length, memory.tokens_seen
        self._uniform = self._uniform_length()
        self._weights = [_fused_projection(backbone, n) for n in range(len(backbone.layers))]
        # Of every layer, for the distances covered so far: R and (v - u).R + S, nearest first, and
        # both again farthest first, the order in which decoding needs them.
        self._nearest_first: list[tuple[Tensor, Tensor]] = []
        self._farthest_first: list[tuple[Tensor, Tensor]] = []
        self._covered = 0
        # Buffers hold [memory | room]; self._end is one past the newest column.
        self._hidden = memory.hidden.detach().transpose(0, 1)
        self._keys, self._values = [], []
        for layer, hidden in zip(backbone.stack(), self._hidden, strict=True):
            context = layer.normalise_context(hidden.to(backbone.content_bias.dtype))
            self._keys.append(layer.attention.heads(layer.attention.key(context)))
            self._values.append(layer.attention.heads(layer.attention.value(context)))
        self._end = self.slots

    @property
    def memory(self) -> TransformerXLMemory:
        """The memory after all that was read, a value of its own."""
        recent = self._hidden[:, :, self._end - self.slots : self._end]
        return TransformerXLMemory(
            tokens_seen=self.tokens_seen,
            # A copy: a view would keep the whole buffer alive.
            hidden=recent.transpose(0, 1).clone(memory_format=torch.contiguous_format),
            length=self.length,
        )

    def read(self, x: Tensor) -> Tensor:
        """``[B, T, D] -> [B, T, D]``, the backbone's output; the reader then stands after ``x``."""
        n_new = x.shape[1]
        self._make_room(n_new)
        self._cover(self.slots + n_new)
        # Rows of one length need no mask over memory: only its valid end is looked at.
        valid = self.slots if self._uniform is None else self._uniform
        mask = None
        fixed = self.backbone.config.attention_span == "fixed"
        if n_new > 1 or self._uniform is None or fixed:
            mask = self.backbone.visible(self.length, n_new, self.slots)
            mask = mask[:, :, self.slots - valid :]
        seen, new = slice(self._end - valid, self._end + n_new), slice(self._end, self._end + n_new)
        h = x
        for n, layer in enumerate(self.backbone.stack()):
            self._hidden[n, :, new] = h
            projected = F.linear(layer.normalise_context(h), *self._weights[n])
            q, k, v = layer.attention.heads(projected).chunk(3, 1)
            self._keys[n][:, :, new] = k
            self._values[n][:, :, new] = v
            k, v = self._keys[n][:, :, seen], self._values[n][:, :, seen]
            attended = self._attend(n, q, k, v, mask)
            h = layer.residual(h, layer.attention.output(attended.transpose(1, 2).flatten(2)))
        self._end += n_new
        self._count(n_new)
        return self.backbone.final_norm(h)

    def _attend(self, n: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        span = k.shape[2]
        if q.shape[2] > 1:
            keys, scores = self._nearest_first[n]
            return relative_attention(
                q, k, v, keys[:, :span], position_scores=scores[:, :span], mask=mask
            )
        keys, scores = self._farthest_first[n]
        start = self._covered - span
        one = None if mask is None else mask[:, 0]
        scale = q.shape[-1] ** -0.5
        return attend_one(
            q.squeeze(2), k, v, keys[:, start:], scores[:, start:], one, scale
        ).unsqueeze(2)

    def _count(self, n_new: int) -> None:
        self.tokens_seen = self.tokens_seen + n_new
        if self._uniform is None:
            self.length = (self.length + n_new).clamp(max=self.slots)
            self._uniform = self._uniform_length()
        elif self._uniform < self.slots:
            self._uniform = min(self._uniform + n_new, self.slots)
            self.length = torch.full_like(self.length, self._uniform)

    def _uniform_length(self) -> int | None:
        lengths = self.length.tolist()
        return lengths[0] if len(set(lengths)) == 1 else None

    def _make_room(self, n_new: int) -> None:
        if self._end + n_new <= self._hidden.shape[2]:
            return
        room = self.slots + n_new + max(self.slots, 64)

        def moved(buffer: Tensor) -> Tensor:
            fresh = buffer.new_empty(*buffer.shape[:2], room, buffer.shape[3])
            fresh[:, :, : self.slots] = buffer[:, :, self._end - self.slots : self._end]
            return fresh

        self._hidden = moved(self._hidden)
        self._keys = [moved(t) for t in self._keys]
        self._values = [moved(t) for t in self._values]
        self._end = self.slots

    def _cover(self, span: int) -> None:
        """Project the distances once; again only if a longer segment comes."""
        if span <= self._covered:
            return
        codes = self.backbone.position_codes(span, self.slots)
        self._nearest_first, self._farthest_first, self._covered = [], [], span
        for n, layer in enumerate(self.backbone.stack()):
            keys, scores = layer.attention.distances(codes)
            u, v = self.backbone.biases(n)
            # The projected query holds u already: what is left of v is v - u.
            shift = -u if v is None else v - u
            by_distance = (keys @ shift[:, :, None]).squeeze(-1)
            scores = by_distance if scores is None else by_distance + scores
            self._nearest_first.append((keys.contiguous(), scores))
            self._farthest_first.append((keys.flip(1), scores.flip(1)))


def _fused_projection(backbone: TransformerXL, n: int) -> tuple[Tensor, Tensor]:
    """Query, key and value weights of layer ``n`` as one, with ``u`` as the query's bias."""
    attention = next(layer for i, layer in enumerate(backbone.stack()) if i == n).attention
    u, _ = backbone.biases(n)
    value_bias = attention.value.bias
    biases = [u.flatten(), torch.zeros_like(u.flatten())]
    biases.append(biases[1] if value_bias is None else value_bias)
    weights = [attention.query.weight, attention.key.weight, attention.value.weight]
    return torch.cat(weights), torch.cat(biases)
