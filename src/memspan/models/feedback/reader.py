"""The reader of a Feedback Transformer, which caches the keys and values of memory."""

from __future__ import annotations

import torch
from torch import Tensor

from memspan.models.feedback.model import (
    Feedback,
    FeedbackMemory,
    newest_slots,
    tokens_seen_by,
)
from memspan.models.in_place import BufferedReader
from memspan.ops.feedback.recurrence import StreamingLoop
from memspan.ops.feedback.steps import new_slots
from memspan.trees import to_device


class FeedbackReader(BufferedReader[FeedbackMemory]):
    """Reads a stream without gradients. Each token's keys and values are computed once, and appended to
    a buffer ``[memory | room]``. When it is full, its last ``S`` columns move to a new one."""

    @torch.no_grad()
    def __init__(self, backbone: Feedback, memory: FeedbackMemory) -> None:
        self._batch, self.span, _ = memory.vectors.shape
        super().__init__(backbone, memory)
        self.backbone = backbone
        self._n_heads = backbone.config.n_heads
        self._begin(memory.tokens_seen, memory.counts()["length"])
        self._span_masks = [layer.span_mask() for layer in backbone.stack()]
        # The loop that models train with, for a copy of their weights; none has learned spans.
        self._loop = None
        if backbone.can_fuse():
            config = backbone.config
            eps = next(backbone.stack()).attention_norm.eps
            weights = backbone.fold(self.span)
            self._loop = StreamingLoop(weights, self._batch, self.span, config.activation, eps)
        self._new_slots = new_slots if self._loop is None else self._loop.loops.new_slots
        # self._end: one past the newest column.
        # A copy, since rows are replaced in place.
        vectors = memory.vectors.to(backbone.dtype).transpose(0, 1)
        self._vectors = vectors.clone(memory_format=torch.contiguous_format)
        with torch.autocast(backbone.device.type, enabled=False):
            projected = self._projected(self._vectors)
        self._kv = self._new_slots(projected, *projected.shape[1:]).copy_(projected)
        self._end = self.span

    def _memory(self, rows: Tensor | slice, at: Tensor | slice) -> FeedbackMemory:
        recent = self._vectors[self._end - self.span : self._end]
        return FeedbackMemory(
            tokens_seen=self._tokens_seen[at],
            vectors=recent.transpose(0, 1)[at].clone(memory_format=torch.contiguous_format),
            length=to_device(self._length()[rows], self._device),
        )

    def _empty(self, rows: Tensor, at: Tensor) -> None:
        # Masked values are still multiplied by zero, which leaves NaN where one is not finite.
        self._vectors[self._end - self.span : self._end].index_fill_(1, at, 0)
        self._recent_kv().index_fill_(3, at, 0)
        length = self._length().index_fill(0, rows, 0)
        self._begin(self._tokens_seen.index_fill(0, at, 0), length)

    def _put(self, rows: Tensor, at: Tensor, memory: FeedbackMemory) -> None:
        """Keys and values are computed for these rows alone."""
        seen = to_device(memory.tokens_seen, self._device)
        vectors = to_device(memory.vectors, self._device, self._vectors.dtype).transpose(0, 1)
        with torch.autocast(self._device.type, enabled=False):
            kv = self._projected(vectors).unflatten(2, (self._n_heads, len(at)))
        self._vectors[self._end - self.span : self._end].index_copy_(1, at, vectors)
        self._recent_kv().index_copy_(3, at, kv)
        length = self._length().index_copy(0, rows, memory.length.cpu())
        self._begin(self._tokens_seen.index_copy(0, at, seen), length)

    def _recent_kv(self) -> Tensor:
        """The slots that may still be attended, ``[2, G, H, B, S, K]``."""
        recent = self._kv[:, :, :, self._end - self.span : self._end]
        return recent.unflatten(2, (self._n_heads, self._batch))

    def _begin(self, tokens_seen: Tensor, length: Tensor) -> None:
        """Set each row's tokens seen and valid slots; the latter on the CPU."""
        self._tokens_seen = tokens_seen
        self._old_length = length
        lengths = length.tolist()
        self._shortest = min(lengths, default=0)
        self._longest = max(lengths, default=0)

    def _read(self, x: Tensor) -> Tensor:
        self._make_room(x.shape[1])
        x = x.to(self._vectors.dtype)
        if self._loop is not None:
            return self._read_piece(x)
        return torch.cat([self._read_piece(token) for token in x.split(1, 1)], 1)

    def _read_piece(self, x: Tensor) -> Tensor:
        n_new = x.shape[1]
        valid = min(self._longest + self._n_read, self.span)
        # Rows of equal length need no mask: only their valid columns are read.
        equal = self._shortest + self._n_read >= valid
        visible = None
        if not equal:
            visible = tokens_seen_by(x, to_device(self._length(), self._device))
        kv = self._kv.narrow(3, self._end - valid, valid + n_new)
        read = self._by_layers if self._loop is None else self._loop.read
        h, vectors = read(x, kv, visible)
        self._vectors[self._end : self._end + n_new] = vectors
        self._end += n_new
        self._n_read += n_new
        normed = self.backbone.final_norm(h)
        # The loop's output is overwritten by the next call.
        return h.clone() if normed is h else normed

    def _by_layers(self, x: Tensor, kv: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
        """As :meth:`StreamingLoop.read`, for what that does not support: one token, by the reference's
        layers."""
        valid = kv.shape[3] - 1
        slots = x.new_ones(self._batch, valid, dtype=torch.bool)
        if visible is not None:
            slots = newest_slots(valid, visible[:, 0])
        # [2, G, H * B, N, K] -> [2, G, B, H, N, K]
        past = kv[..., :-1, :].unflatten(2, (self._n_heads, self._batch)).transpose(2, 3)
        states = [x[:, 0]]
        with torch.autocast(x.device.type, enabled=False):
            for n, layer in enumerate(self.backbone.stack()):
                keys, values = past[:, n if len(self.backbone.key) > 1 else 0].unbind(0)
                states.append(layer(states[-1], keys, values, slots, self._span_masks[n]))
            vector = torch.einsum("l,lbd->bd", self.backbone.mix(), torch.stack(states))[None]
            kv[..., -1:, :] = self._projected(vector)
        return states[-1][:, None], vector

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
        return (self._old_length + self._n_read).clamp(max=self.span)

    def _make_room(self, n_new: int) -> None:
        if self._end + n_new <= len(self._vectors):
            return
        room = self.span + n_new + max(self.span, 64)
        recent = slice(self._end - self.span, self._end)
        vectors = self._vectors.new_empty(room, *self._vectors.shape[1:])
        vectors[: self.span] = self._vectors[recent]
        _, *outer, _, width = self._kv.shape
        kv = self._new_slots(self._kv, *outer, room, width)
        kv[:, :, :, : self.span] = self._kv[:, :, :, recent]
        self._vectors = vectors
        self._kv = kv
        self._end = self.span
