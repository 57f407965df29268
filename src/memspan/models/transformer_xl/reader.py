"""The reader of Transformer-XL, which caches the keys and values of memory."""

from __future__ import annotations

import torch
from torch import Tensor

from memspan.models.relative.reader import RelativeReader
from memspan.models.segments import Documents, count_after
from memspan.models.transformer_xl.model import TransformerXLMemory
from memspan.nn import in_use
from memspan.trees import to_device


class TransformerXLReader(RelativeReader[TransformerXLMemory]):
    """See :class:`~memspan.models.relative.reader.RelativeReader`."""

    @staticmethod
    def _slots(memory: TransformerXLMemory) -> Tensor:
        return memory.hidden

    def _memory(self, rows: Tensor | slice, at: Tensor | slice) -> TransformerXLMemory:
        recent = slice(self._end - self.n_slots, self._end)
        hidden = torch.stack([h[at, recent] for h in self._hidden], 1)
        length = to_device(self._counts["length"][rows], self._device)
        valid = in_use(self.n_slots, length)[:, None, :, None]
        return TransformerXLMemory(
            tokens_seen=self._tokens_seen[at],
            # Slots that are not valid are zero.
            hidden=hidden.where(valid, hidden.new_zeros(())),
            length=length,
        )

    def _advance(self, n_new: int, documents: Documents | None, received: list[Tensor]) -> None:
        self._count_tokens(n_new, documents)
        if documents is None and self._equal and self._most == self.n_slots:
            return
        length = self._counts["length"]
        if documents is not None:
            length = length.to(documents.n_last.device)
        after = count_after(length, n_new, documents).cpu()
        self._count(length=after.clamp(max=self.n_slots))
