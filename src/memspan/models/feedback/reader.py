"""The reader of a Feedback Transformer, which caches the keys and values of memory."""

from __future__ import annotations

import torch
from torch import Tensor

from memspan.memory import Memory, Rows
from memspan.models.feedback.model import Feedback, FeedbackMemory
from memspan.models.protocol import WatchedReader
from memspan.models.segments import cuts
from memspan.ops.feedback import compiled as feedback_loop
from memspan.ops.feedback.compiled import CompiledReader
from memspan.ops.feedback.token_step import TokenStep
from memspan.trees import sent


class FeedbackReader(WatchedReader):
    """Reads a stream without gradients. Each token's keys and values are computed once.

    They are appended to a buffer ``[memory | room]``. When it is full, its last ``S`` columns move to a
    new one, so the cost per token is constant.
    """

    @torch.no_grad()
    def __init__(self, backbone: Feedback, memory: FeedbackMemory) -> None:
        super().__init__(backbone)
        self.backbone = backbone
        self._batch, self.span, _ = memory.vectors.shape
        self._rows, self._device = Rows.of(memory), memory.vectors.device
        self._n_heads = backbone.config.n_heads
        self._begin(memory.tokens_seen, memory.counts()["length"])
        self._count = 0
        self._span_masks = [layer.span_mask() for layer in backbone.stack()]
        self._compiled, self._step = self._whole_steps()
        # self._end: one past the newest column.
        # A copy, since rows are replaced in place.
        vectors = memory.vectors.to(backbone.dtype).transpose(0, 1)
        self._vectors = vectors.clone(memory_format=torch.contiguous_format)
        with torch.autocast(backbone.device.type, enabled=False):
            self._kv = self._projected(self._vectors)
            if self._compiled is not None:
                # The loop in C needs the columns contiguous; shapes stay the same.
                self._kv = self._kv.transpose(3, 4).contiguous().transpose(3, 4)
        self._end = self.span

    def _whole_steps(self) -> tuple[CompiledReader | None, TokenStep | None]:
        """What takes a token through all layers at once, with a copy of their weights: the loop in C,
        or without a compiler the step. Neither with learned spans."""
        backbone = self.backbone
        if not backbone.can_fuse():
            return None, None
        weights = backbone.fold(self.span)
        activation, eps = backbone.config.activation, next(backbone.stack()).attention_norm.eps
        if feedback_loop.available(weights.mix):
            return CompiledReader(weights, self._batch, self.span, activation, eps), None
        return None, TokenStep(weights, self._batch, activation, eps)

    @property
    def memory(self) -> FeedbackMemory:
        """The memory after the last token: a copy, which reading on does not change."""
        return self._memory(slice(None), slice(None))

    def select(self, rows: Tensor | list[int]) -> FeedbackMemory:
        """See :meth:`BackboneReader.select`."""
        numbers = self._rows.numbers(rows)
        return self._memory(numbers, sent(numbers, self._device))

    def _memory(self, rows: Tensor | slice, at: Tensor | slice) -> FeedbackMemory:
        """Of ``rows``, counted on the CPU, and ``at`` the same on the device."""
        recent = self._vectors[self._end - self.span : self._end]
        return FeedbackMemory(
            tokens_seen=self._tokens_seen[at] + self._count,
            vectors=recent.transpose(0, 1)[at].clone(memory_format=torch.contiguous_format),
            length=sent(self._length()[rows], self._device),
        )

    @property
    def _sizes(self) -> tuple[int, torch.device, int]:
        return self.backbone.config.d_model, self._device, self._batch

    def _read_vectors(self, x: Tensor, starts: Tensor | None) -> Tensor:
        self.watch.refuse_changes(x.shape[1] > 1)
        if starts is None or not starts.numel():
            return self._read(x)
        pieces, starts = [], starts.cpu()
        for start, end in cuts(starts):
            self.reset(starts[:, start])
            pieces.append(self._read(x[:, start:end]))
        return torch.cat(pieces, 1)

    @torch.no_grad()
    def reset(self, mask: Tensor | list[bool]) -> None:
        """See :meth:`BackboneReader.reset`."""
        rows = self._rows.mask(mask).nonzero().flatten()
        if not len(rows):
            return
        self.watch.refuse_changes(whole=False)
        at = sent(rows, self._device)
        # Masked values are still multiplied by zero, which leaves NaN where one is not finite.
        self._vectors[self._end - self.span : self._end].index_fill_(1, at, 0)
        self._recent_kv().index_fill_(3, at, 0)
        self._begin(
            self._tokens_seen.index_fill(0, at, -self._count),
            self._length().index_fill(0, rows, 0) - self._count,
        )

    @torch.no_grad()
    def replace(self, rows: Tensor | list[int], memory: Memory) -> None:
        """See :meth:`BackboneReader.replace`. Keys and values are computed for these rows alone."""
        self.watch.refuse_changes(whole=False)
        numbers, given = self._rows.replacement(rows, memory)
        # Whatever may fail comes before the first change.
        at = sent(numbers, self._device)
        seen = sent(given.tokens_seen, self._device) - self._count
        vectors = sent(given.vectors, self._device, self._vectors.dtype).transpose(0, 1)
        with torch.autocast(self._device.type, enabled=False):
            kv = self._projected(vectors).unflatten(2, (self._n_heads, len(at)))
        self._vectors[self._end - self.span : self._end].index_copy_(1, at, vectors)
        self._recent_kv().index_copy_(3, at, kv)
        self._begin(
            self._tokens_seen.index_copy(0, at, seen),
            self._length().index_copy(0, numbers, given.length.cpu()) - self._count,
        )

    def _recent_kv(self) -> Tensor:
        """The slots that may still be attended, ``[2, G, H, B, S, K]``."""
        recent = self._kv[:, :, :, self._end - self.span : self._end]
        return recent.unflatten(2, (self._n_heads, self._batch))

    def _begin(self, tokens_seen: Tensor, length: Tensor) -> None:
        """Set each row's tokens seen and valid slots, both less ``_count``, the tokens read since; the
        latter on the CPU."""
        self._tokens_seen, self._old_length = tokens_seen, length
        lengths = length.tolist()
        self._shortest, self._longest = min(lengths, default=0), max(lengths, default=0)

    def _read(self, x: Tensor) -> Tensor:
        self._make_room(x.shape[1])
        x = x.to(self._vectors.dtype)
        if self._compiled is not None and x.shape[1]:
            return self._read_compiled(x)
        with torch.autocast(x.device.type, enabled=False):
            h = torch.empty_like(x)
            for t, x_t in enumerate(x.unbind(1)):
                h[:, t] = self._read_one(x_t)
            return self.backbone.final_norm(h)

    def _read_compiled(self, x: Tensor) -> Tensor:
        assert self._compiled is not None
        valid = min(self._longest + self._count, self.span)
        length = None
        if self._shortest + self._count < valid:
            length = sent(self._length(), self._device)
        kv = self._kv.transpose(3, 4)
        h, vectors = self._compiled.read(x, kv, self._end, valid, length)
        self._vectors[self._end : self._end + len(vectors)] = vectors
        self._end += len(vectors)
        self._count += len(vectors)
        normed = self.backbone.final_norm(h)
        # The loop's output is overwritten by the next call.
        return h.clone() if normed is h else normed

    def _read_one(self, x: Tensor) -> Tensor:
        # Rows of equal length need no mask: only their valid columns are read.
        valid = min(self._longest + self._count, self.span)
        kv = self._kv[:, :, :, self._end - valid : self._end]
        absent = None
        if self._shortest + self._count < valid:
            slot = torch.arange(self.span - valid, self.span, device=x.device)
            absent = slot < self.span - sent(self._length(), self._device)[:, None]
        vector, column = self._vectors[self._end], self._kv[:, :, :, self._end]
        if self._step is not None:
            column = column.unflatten(2, (self._n_heads, self._batch)).permute(3, 0, 1, 2, 4)
            h = self._step(x, kv, absent, vector, column)
        else:
            h = self._by_layers(x, kv, absent, vector, column)
        self._end += 1
        self._count += 1
        return h

    def _by_layers(
        self, x: Tensor, kv: Tensor, absent: Tensor | None, vector: Tensor, column: Tensor
    ) -> Tensor:
        """The reference's step, for what :class:`TokenStep` does not support."""
        visible = x.new_ones(self._batch, kv.shape[3], dtype=torch.bool)
        if absent is not None:
            visible = ~absent
        # [2, G, H * B, N, K] -> [2, G, B, H, N, K]
        grouped = kv.unflatten(2, (self._n_heads, self._batch)).transpose(2, 3)
        states = [x]
        for n, layer in enumerate(self.backbone.stack()):
            keys, values = grouped[:, n if len(self.backbone.key) > 1 else 0].unbind(0)
            states.append(layer(states[-1], keys, values, visible, self._span_masks[n]))
        vector.copy_(torch.einsum("l,lbd->bd", self.backbone.mix(), torch.stack(states)))
        column.copy_(self._projected(vector[None]).squeeze(3))
        return states[-1]

    def _projected(self, vectors: Tensor) -> Tensor:
        """Keys and values of ``[N, B, D]``: ``[2, G, H * B, N, K]``, where ``G`` counts projections."""
        backbone = self.backbone
        vectors = backbone.memory_norm(vectors)
        projected = [
            torch.stack([projection(vectors) for projection in projections])
            for projections in (backbone.key, backbone.value)
        ]
        # [2, G, N, B, H * K]
        kv = torch.stack(projected).unflatten(-1, (self._n_heads, -1))
        return kv.permute(0, 1, 4, 3, 2, 5).flatten(2, 3)

    def _length(self) -> Tensor:
        return (self._old_length + self._count).clamp(max=self.span)

    def _make_room(self, n_new: int) -> None:
        if self._end + n_new <= len(self._vectors):
            return
        room = self.span + n_new + max(self.span, 64)
        recent = slice(self._end - self.span, self._end)
        vectors = self._vectors.new_empty(room, *self._vectors.shape[1:])
        vectors[: self.span] = self._vectors[recent]
        *outer, _, width = self._kv.shape
        if self._compiled is not None:
            kv = self._kv.new_empty(*outer, width, room).transpose(3, 4)
        else:
            kv = self._kv.new_empty(*outer, room, width)
        kv[:, :, :, : self.span] = self._kv[:, :, :, recent]
        self._vectors, self._kv, self._end = vectors, kv, self.span
