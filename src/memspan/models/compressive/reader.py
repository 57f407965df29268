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
from memspan.models.relative.attention import Span
from memspan.models.relative.reader import RelativeReader
from memspan.models.segments import Documents
from memspan.nn import where_in_use
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
        self.counts_attention = backbone.config.needs_received
        self.rate = backbone.config.compression_rate
        self.compressed_slots = self.n_slots - self.slots

    @staticmethod
    def _slots(memory: CompressiveMemory) -> Tensor:
        return in_one_row(memory)

    def _fields(self, at: Tensor | slice, counts: dict[str, Tensor]) -> dict[str, Tensor]:
        length = counts["length"]
        used = counts["compressed_length"]
        columns = ops.newest(self.compressed_slots, 0, torch.zeros_like(length), self._end - length)
        compressed = torch.stack([ops.pick(h[at], columns) for h in self._hidden], 1)
        return super()._fields(at, counts) | {"compressed": where_in_use(compressed, used)}

    def _advance(self, n_new: int, documents: Documents | None, received: list[Tensor]) -> None:
        """Advance, and compress the slots that no longer fit."""
        counts, added = self._step_over(n_new, documents)
        length = counts["length"]
        compressed = counts["compressed_length"]
        fits = documents is None and max(length.tolist(), default=0) + n_new <= self.slots
        if fits or not len(length):
            # Nothing leaves memory.
            self._count(length=length + n_new, compressed_length=compressed)
            return
        sizes = self.slots, self.compressed_slots, self.rate
        after = ops.append(length, compressed, added, *sizes)
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
        # Columns of the oldest tokens. Slots that a row lacks may point at any written column.
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
            places = (t[rows] for t in (column, older, kept))
            step.insert(hidden.squeeze(2), self._buffers(), rows, *places)
            return
        # The slots that they become, and the compressed slots before and after.
        new = end - back[-runs:]
        slots = torch.arange(self.compressed_slots, 0, -1, device=self._device)
        n_compressed, total = (
            to_device(t[rows], self._device)[:, None] for t in (after.n_compressed, after.total)
        )
        older = (self._end - total - slots).clamp(min=0)
        moved = end - n_compressed - slots
        made = hidden, *self._keys_and_values(hidden)
        for buffer, slots in zip(self._buffers(), made, strict=True):
            _put_in_front(buffer, slots, at, older, new, moved)

    @cached_property
    def _compressions(self) -> list[Compression]:
        """Per layer a copy whose convolutions are laid out as the matrices that they become."""
        layers = (layer.attention.compression for layer in self.backbone.stack())
        compressions = [compression for compression in layers if compression is not None]
        # Within functional_call parameters may have a history, which deepcopy refuses.
        parameters = (p for compression in compressions for p in compression.parameters())
        copies = copy.deepcopy(
            compressions, {id(p): p.detach() for p in parameters if not p.is_leaf}
        )
        for compression in copies:
            for parameter in compression.parameters():
                if parameter.dim() > 2:
                    parameter.data = parameter.data.mT.contiguous().mT
        return copies


def _put_in_front(buffer: Tensor, made: Tensor, rows: Tensor, *columns: Tensor) -> None:
    """Write the compressed slots ``made`` into ``rows [b]`` of a ``buffer [L, B, (H,) C, K]``, and the
    older ones, which move, before them.

    ``columns``: of the older ones, of the new ones, and where the older ones move, ``[b, n]`` each.
    """
    *outer, room, width = buffer.shape
    # As rows of one matrix, of which those of each row and head begin at another place.
    first = torch.arange(0, buffer.numel() // width, room, device=buffer.device)
    first = first.view(outer)[:, rows, ..., None]
    older, new, moved = (
        (first + (c if buffer.dim() == 4 else c[:, None])).flatten() for c in columns
    )
    matrix = buffer.view(-1, width)
    kept = matrix.index_select(0, older)
    matrix.index_copy_(0, new, made.flatten(0, -2).to(matrix.dtype))
    # Last, since rows with fewer new ones than others have their older ones further right.
    matrix.index_copy_(0, moved, kept)
