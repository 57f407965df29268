"""Reading on with a Compressive Transformer: keys and values of both memories are computed once."""

from __future__ import annotations

import torch
from torch import Tensor

from memspan.models.compressive import compression as ops
from memspan.models.compressive.model import Compressive, CompressiveMemory, in_one_row
from memspan.models.relative.reader import ReaderAttention
from memspan.models.relative.self_attention import Span
from memspan.models.segments import Documents, count_after, documents_of, in_use


class CompressiveReader:
    """Reads a stream without gradients; keys and values of both memories are projected once and kept.

    With frozen weights those of a slot never change. Buffers hold ``[compressed | memory | room]``, the
    row's slots ending at one column; a pass appends, and where it makes a row compress, all rows'
    slots move to the buffer's start with the new compressed ones among them. That happens once every
    ``c`` tokens at most, so the cost per token is constant.
    """

    def __init__(self, backbone: Compressive, memory: CompressiveMemory, span: Span) -> None:
        self.backbone = backbone
        self.rate = backbone.config.compression_rate
        self.slots, self.compressed_slots = memory.hidden.shape[2], memory.compressed.shape[2]
        self._attention = ReaderAttention(list(backbone.stack()), backbone, span)
        self._end = self.slots + self.compressed_slots
        self._attention.cover(self._end + 1, self._end)
        self._tokens_seen = memory.tokens_seen
        self._device = memory.length.device
        # Counts stay on the CPU: the shapes of a pass depend on them.
        self._length, self._compressed = memory.length.cpu(), memory.compressed_length.cpu()
        dtype = backbone.content_bias.dtype
        self._hidden = list(in_one_row(memory).detach().to(dtype).unbind(1))
        self._keys, self._values = [], []
        for n, hidden in enumerate(self._hidden):
            keys, values = self._attention.keys_and_values(n, hidden)
            self._keys.append(keys)
            self._values.append(values)

    @property
    def memory(self) -> CompressiveMemory:
        """The memory after all that was read, a value of its own."""
        length, compressed = self._length.to(self._device), self._compressed.to(self._device)
        recent = self._recent(self._end, length, self.compressed_slots)
        hidden = torch.stack([h[:, self._end - self.slots : self._end] for h in self._hidden], 1)
        older = torch.stack([ops.pick(h, recent) for h in self._hidden], 1)
        zero = hidden.new_zeros(())
        return CompressiveMemory(
            tokens_seen=self._tokens_seen,
            hidden=hidden.where(in_use(self.slots, length)[:, None, :, None], zero),
            compressed=older.where(
                in_use(self.compressed_slots, compressed)[:, None, :, None], zero
            ),
            length=length,
            compressed_length=compressed,
        )

    def read(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        """``[B, T, D] -> [B, T, D]``, the backbone's output; the reader then stands after ``x``.

        ``starts``: bool ``[B, T]``, true where a document begins (None: nowhere).
        """
        if not x.numel():
            return self.backbone.final_norm(x)
        n_new, slots = x.shape[1], self.slots + self.compressed_slots
        _, documents = documents_of(x, starts)
        self._make_room(n_new)
        self._attention.cover(slots + n_new, slots)
        # Only slots that some row uses are looked at; rows that use the same need no mask over them.
        used = self._length + self._compressed
        most = int(used.max())
        mask = None
        span = self._attention.span
        same = int(used.min()) == most
        if n_new > 1 or not same or span.attention == "fixed" or documents is not None:
            mask = span.visible(used.to(self._device), n_new, most, slots, documents)
        seen, new = slice(self._end - most, self._end + n_new), slice(self._end, self._end + n_new)
        received: list[Tensor] = []
        h = x
        for n, layer in enumerate(self.backbone.stack()):
            self._hidden[n][:, new] = h
            q, k, v = self._attention.project(n, h)
            self._keys[n][:, :, new] = k
            self._values[n][:, :, new] = v
            if self.backbone.needs_received:
                received.append(h.new_zeros(len(h), most + n_new))
            k, v = self._keys[n][:, :, seen], self._values[n][:, :, seen]
            counted = received[n] if received else None
            h = layer.residual(h, self._attention.attend(n, q, k, v, mask, counted))
        self._end += n_new
        self._append(n_new, documents, received)
        return self.backbone.final_norm(h)

    def _append(self, n_new: int, documents: Documents | None, received: list[Tensor]) -> None:
        """Count the new tokens, and compress what no longer fits."""
        added: int | Tensor = n_new
        self._tokens_seen = count_after(self._tokens_seen, n_new, documents)
        if documents is not None:
            fresh, added = documents.fresh.cpu(), documents.n_last.cpu()
            self._length = self._length.where(~fresh, 0)
            self._compressed = self._compressed.where(~fresh, 0)
        after = ops.append(
            self._length,
            self._compressed,
            added,
            memory_slots=self.slots,
            compressed_slots=self.compressed_slots,
            rate=self.rate,
        )
        runs = int(after.n_compressed.max())
        if runs and self.compressed_slots:
            self._compress(after, runs, received)
        self._length, self._compressed = after.length, after.compressed_length

    def _compress(self, after: ops.Append, runs: int, received: list[Tensor]) -> None:
        # Of the buffers, the part that holds any row's slots; columns are counted from its start.
        first = max(0, self._end - int(after.total.max()) - self.compressed_slots)
        end, width = self._end - first, self.slots + self.compressed_slots
        total, n_compressed, length = (
            t.to(self._device) for t in (after.total, after.n_compressed, after.length)
        )
        back = torch.arange(runs * self.rate, 0, -1, device=self._device)
        sources = (end - length[:, None] - back).clamp(min=0)
        # In [buffer | new]: the compressed slots, then they and memory in one row.
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
                # Counted from the first column that was looked at.
                looked_at = end - received[n].shape[1]
                use = ops.pick(received[n], (sources - looked_at).clamp(min=0))
            new = layer.compression(ops.pick(hidden, sources), use)
            self._hidden[n][:, :width] = ops.pick(torch.cat([hidden, new], 1), columns.clamp(min=0))
            fresh = self._attention.keys_and_values(n, new)
            for buffer, slots in zip((self._keys[n], self._values[n]), fresh, strict=True):
                both = torch.cat([buffer[:, :, first : self._end], slots], 2)
                picked = ops.pick(both.flatten(0, 1), by_head)
                buffer[:, :, :width] = picked.unflatten(0, both.shape[:2])
        self._end = width

    def _recent(self, end: int, length: Tensor, width: int) -> Tensor:
        """Columns of each row's ``width`` newest compressed slots."""
        return ops.newest(width, 0, torch.zeros_like(length), end - length)

    def _make_room(self, n_new: int) -> None:
        width = self.slots + self.compressed_slots
        if self._end + n_new <= self._hidden[0].shape[1]:
            return
        room, first = width + n_new + max(width, 64), self._end - width

        def moved(buffer: Tensor, dim: int) -> Tensor:
            shape = list(buffer.shape)
            shape[dim] = room
            fresh = buffer.new_zeros(shape)
            fresh.narrow(dim, 0, width).copy_(buffer.narrow(dim, first, width))
            return fresh

        self._hidden = [moved(t, 1) for t in self._hidden]
        self._keys = [moved(t, 2) for t in self._keys]
        self._values = [moved(t, 2) for t in self._values]
        self._end = width
