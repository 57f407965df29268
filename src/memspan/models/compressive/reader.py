"""The reader of a Compressive Transformer, which caches the keys and values of both memories."""

from __future__ import annotations

import torch
from torch import Tensor

from memspan.models.compressive import compression as ops
from memspan.models.compressive.model import Compressive, CompressiveMemory, in_one_row
from memspan.models.relative.reader import RelativeReader
from memspan.models.relative.self_attention import Span
from memspan.models.segments import Documents, count_after, in_use


class CompressiveReader(RelativeReader[CompressiveMemory]):
    """See :class:`~memspan.models.relative.reader.RelativeReader`.

    Buffers hold ``[compressed | memory | room]``, a row's slots side by side. When a pass makes any row
    compress, all rows' slots move to the buffers' start, with the new compressed ones among them. That
    is at most once every ``c`` tokens, so the cost per token is constant.
    """

    backbone: Compressive

    def __init__(self, backbone: Compressive, memory: CompressiveMemory, span: Span) -> None:
        super().__init__(backbone, in_one_row(memory), memory.tokens_seen, span)
        self.counts_attention = backbone.needs_received
        self.rate = backbone.config.compression_rate
        self.slots, self.compressed_slots = memory.hidden.shape[2], memory.compressed.shape[2]
        self._device = memory.length.device
        self._count(memory.length.cpu(), memory.compressed_length.cpu())

    def _count(self, length: Tensor, compressed: Tensor) -> None:
        """Set the valid slots of memory and of compressed memory, int64 ``[B]``."""
        self._length, self._compressed = length, compressed
        self._use(length + compressed)

    @property
    def memory(self) -> CompressiveMemory:
        """The memory after the last token: a copy, which reading on does not change."""
        length, compressed = self._length.to(self._device), self._compressed.to(self._device)
        # Columns of each row's compressed slots.
        older = ops.newest(self.compressed_slots, 0, torch.zeros_like(length), self._end - length)
        recent = slice(self._end - self.slots, self._end)
        hidden = torch.stack([h[:, recent] for h in self._hidden], 1)
        compressed_hidden = torch.stack([ops.pick(h, older) for h in self._hidden], 1)
        valid = in_use(self.slots, length)[:, None, :, None]
        compressed_valid = in_use(self.compressed_slots, compressed)[:, None, :, None]
        zero = hidden.new_zeros(())
        return CompressiveMemory(
            tokens_seen=self._tokens_seen,
            hidden=hidden.where(valid, zero),
            compressed=compressed_hidden.where(compressed_valid, zero),
            length=length,
            compressed_length=compressed,
        )

    def _advance(self, n_new: int, documents: Documents | None, received: list[Tensor]) -> None:
        """Count the new tokens, and compress the slots that no longer fit."""
        added: int | Tensor = n_new
        length, compressed = self._length, self._compressed
        self._tokens_seen = count_after(self._tokens_seen, n_new, documents)
        if documents is not None:
            fresh, added = documents.fresh.cpu(), documents.n_last.cpu()
            length, compressed = length.where(~fresh, 0), compressed.where(~fresh, 0)
        after = ops.append(
            length,
            compressed,
            added,
            memory_slots=self.slots,
            compressed_slots=self.compressed_slots,
            rate=self.rate,
        )
        runs = int(after.n_compressed.max())
        if runs and self.compressed_slots:
            self._compress(after, runs, received)
        self._count(after.length, after.compressed_length)

    def _compress(self, after: ops.Append, runs: int, received: list[Tensor]) -> None:
        # Columns are counted from the first that holds any row's slot.
        first = max(0, self._end - int(after.total.max()) - self.compressed_slots)
        end, width = self._end - first, self.n_slots
        total, n_compressed, length = (
            t.to(self._device) for t in (after.total, after.n_compressed, after.length)
        )
        back = torch.arange(runs * self.rate, 0, -1, device=self._device)
        sources = (end - length[:, None] - back).clamp(min=0)
        # Columns of [buffer | newly compressed]: first of the compressed slots, then of all slots.
        compressed = ops.newest(self.compressed_slots, end + runs, n_compressed, end - total)
        memory = torch.arange(end - self.slots, end, device=self._device).expand(len(total), -1)
        columns = torch.cat([compressed, memory], 1).gather(
            1, ops.newest(width, width, length, self.compressed_slots)
        )
        by_head = columns.clamp(min=0).repeat_interleave(self.backbone.config.n_heads, 0)
        for n, layer in enumerate(self.backbone.stack()):
            assert layer.compression is not None
            hidden = self._hidden[n][:, first : self._end]
            use = None
            if received:
                # Counted from the first column that was attended.
                attended = end - received[n].shape[1]
                use = ops.pick(received[n], (sources - attended).clamp(min=0))
            new = layer.compression(ops.pick(hidden, sources), use)
            self._hidden[n][:, :width] = ops.pick(torch.cat([hidden, new], 1), columns.clamp(min=0))
            fresh = self._attention.keys_and_values(n, new)
            for buffer, slots in zip((self._keys[n], self._values[n]), fresh, strict=True):
                both = torch.cat([buffer[:, :, first : self._end], slots], 2)
                picked = ops.pick(both.flatten(0, 1), by_head)
                buffer[:, :, :width] = picked.unflatten(0, both.shape[:2])
        self._end = width
