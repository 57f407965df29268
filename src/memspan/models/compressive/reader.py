"""The reader of a Compressive Transformer, which caches the keys and values of both memories."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import cached_property

import torch
from torch import Tensor

from memspan.models.compressive import compression as ops
from memspan.models.compressive.layer import Compression, in_one_row
from memspan.models.compressive.model import Compressive, CompressiveMemory
from memspan.models.relative.reader import RelativeReader
from memspan.models.relative.self_attention import Span
from memspan.models.segments import Documents
from memspan.nn import in_use
from memspan.ops.relative_step.compiled import CompiledStep
from memspan.trees import to_device


class CompressiveReader(RelativeReader[CompressiveMemory]):
    """See :class:`~memspan.models.relative.reader.RelativeReader`.

    Buffers hold ``[compressed | memory | room]``, a row's slots side by side. A row that compresses has
    its compressed slots written anew, in front of what remains in memory. That is at most once every
    ``c`` tokens, so the cost per token is constant, whether rows compress together or in turn.
    """

    backbone: Compressive

    def __init__(self, backbone: Compressive, memory: CompressiveMemory, span: Span) -> None:
        super().__init__(backbone, memory, span)
        self.counts_attention = backbone.needs_received
        self.rate = backbone.config.compression_rate
        self.slots, self.compressed_slots = memory.hidden.shape[2], memory.compressed.shape[2]

    @staticmethod
    def _slots(memory: CompressiveMemory) -> Tensor:
        return in_one_row(memory)

    def _memory(self, rows: Tensor | slice, at: Tensor | slice) -> CompressiveMemory:
        length, compressed = (
            to_device(self._counts[name][rows], self._device)
            for name in ("length", "compressed_length")
        )
        # Columns of each row's compressed slots.
        older = ops.newest(self.compressed_slots, 0, torch.zeros_like(length), self._end - length)
        recent = slice(self._end - self.slots, self._end)
        hidden = torch.stack([h[at, recent] for h in self._hidden], 1)
        compressed_hidden = torch.stack([ops.pick(h[at], older) for h in self._hidden], 1)
        valid = in_use(self.slots, length)[:, None, :, None]
        compressed_valid = in_use(self.compressed_slots, compressed)[:, None, :, None]
        zero = hidden.new_zeros(())
        return CompressiveMemory(
            tokens_seen=self._tokens_seen[at],
            hidden=hidden.where(valid, zero),
            compressed=compressed_hidden.where(compressed_valid, zero),
            length=length,
            compressed_length=compressed,
        )

    def _advance(self, n_new: int, documents: Documents | None, received: list[Tensor]) -> None:
        """Count the new tokens, and compress the slots that no longer fit."""
        added: int | Tensor = n_new
        length, compressed = self._counts["length"], self._counts["compressed_length"]
        self._count_tokens(n_new, documents)
        if documents is None and max(length.tolist()) + n_new <= self.slots:
            # Nothing leaves memory.
            self._count(length=length + n_new, compressed_length=compressed)
            return
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
            step = self._step_for(self._hidden, self._hidden.dtype) if n_new == 1 else None
            # Autocast would round the compression's weights again at every call.
            by_step = step is not None and torch.is_autocast_enabled("cpu")
            with torch.autocast("cpu", enabled=False) if by_step else nullcontext():
                self._compress(after, runs, received, step)
        self._count(length=after.length, compressed_length=after.compressed_length)

    def _compress(
        self, after: ops.Append, runs: int, received: list[Tensor], step: CompiledStep | None
    ) -> None:
        """Compress in the rows that are due: ``runs`` runs at most, one with ``step``."""
        rows = after.n_compressed.nonzero().flatten()
        at, length = (to_device(t, self._device) for t in (rows, after.length[rows]))
        # Columns of the oldest tokens. Of slots that a row does not have they may be any that were
        # written to.
        end = (self._end - length)[:, None]
        back = torch.arange(runs * self.rate, 0, -1, device=self._device)
        sources = (end - back).clamp(min=0)
        old = self._hidden[:, at[:, None], sources]
        compressed = []
        for n, compression in enumerate(self._compressions):
            use = None
            if received:
                # Counted from the first column that was attended.
                attended = self._end - received[n].shape[1]
                use = ops.pick(received[n][at], (sources - attended).clamp(min=0))
            compressed.append(compression(old[n], use))
        hidden = torch.stack(compressed)
        if step is not None:
            column = self._end - after.length - 1
            kept = self._counts["compressed_length"].clamp(max=self.compressed_slots - 1)
            older = self._end - after.total - kept
            buffers = self._hidden, self._keys, self._values
            step.insert(hidden.squeeze(2), buffers, rows, *(t[rows] for t in (column, older, kept)))
            return
        # What they become, and the compressed slots before and after.
        new = end - back[-runs:]
        slots = torch.arange(self.compressed_slots, 0, -1, device=self._device)
        n_compressed, total = (
            to_device(t[rows], self._device)[:, None] for t in (after.n_compressed, after.total)
        )
        older = (self._end - total - slots).clamp(min=0)
        moved = end - n_compressed - slots
        keys, values = self._keys_and_values(hidden)
        _put_in_front(self._hidden, hidden, *(self._places(at, c, 1) for c in (older, new, moved)))
        n_heads = self.backbone.config.n_heads
        by_head = [self._places(at, c, n_heads) for c in (older, new, moved)]
        _put_in_front(self._keys, keys, *by_head)
        _put_in_front(self._values, values, *by_head)

    @cached_property
    def _compressions(self) -> list[Compression]:
        """Per layer a copy whose convolutions are laid out as the matrices that they become."""
        copies = []
        for layer in self.backbone.stack():
            assert layer.compression is not None
            copies.append(copy.deepcopy(layer.compression))
            for parameter in copies[-1].parameters():
                if parameter.dim() > 2:
                    parameter.data = parameter.data.mT.contiguous().mT
        return copies

    def _places(self, rows: Tensor, columns: Tensor, n_heads: int) -> Tensor:
        """Where ``columns [b, n]`` of ``rows [b]`` are in all layers, ``[L, b, H, n]``: in a buffer
        ``[L, B, H, C, K]`` that is seen as ``[L * B * H * C, K]``."""
        n_layers, n_rows, room, _ = self._hidden.shape
        layer = torch.arange(n_layers, device=rows.device)[:, None] * n_rows
        head = torch.arange(n_heads, device=rows.device)
        return ((layer + rows)[..., None] * n_heads + head)[..., None] * room + columns[:, None]


def _put_in_front(buffer: Tensor, new: Tensor, older: Tensor, at: Tensor, moved: Tensor) -> None:
    """Write new compressed slots ``at`` their places, and the ``older`` ones, ``moved``, before them.

    Last, since rows with fewer new ones than others have their older ones further right.
    """
    flat = buffer.view(-1, buffer.shape[-1])
    kept = flat.index_select(0, older.flatten())
    flat.index_copy_(0, at.flatten(), new.flatten(0, -2).to(flat.dtype))
    flat.index_copy_(0, moved.flatten(), kept)
