"""Reading on with a Transformer-XL: keys and values of memory are computed once."""

from __future__ import annotations

from torch import Tensor

from memspan.models.relative.reader import ReaderAttention
from memspan.models.relative.self_attention import Span
from memspan.models.segments import Documents, count_after, documents_of, in_use
from memspan.models.transformer_xl.model import TransformerXL, TransformerXLMemory, check_slots


class TransformerXLReader:
    """Reads a stream without gradients; keys and values of memory are projected once and kept.

    With frozen weights a slot's keys and values never change, whichever the norm, so nothing is
    recomputed and the result equals the model's. They live in buffers with room to grow; when a
    buffer is full its last ``M`` columns move to a fresh one, so the cost per token is constant.
    """

    def __init__(self, backbone: TransformerXL, memory: TransformerXLMemory, span: Span) -> None:
        self.backbone = backbone
        self.slots = memory.hidden.shape[2]
        check_slots(self.slots, span)
        self._attention = ReaderAttention(list(backbone.stack()), backbone, span)
        self._attention.cover(self.slots + 1, self.slots)
        self._tokens_seen = memory.tokens_seen
        # Counts stay on the CPU: the shapes of a pass depend on them.
        self._length = memory.length.cpu()
        self._uniform = _uniform(self._length)
        # Buffers hold [memory | room]; self._end is one past the newest column.
        dtype = backbone.content_bias.dtype
        self._hidden = memory.hidden.detach().to(dtype).transpose(0, 1)
        self._keys, self._values = [], []
        for n, hidden in enumerate(self._hidden):
            keys, values = self._attention.keys_and_values(n, hidden)
            self._keys.append(keys)
            self._values.append(values)
        self._end = self.slots

    @property
    def memory(self) -> TransformerXLMemory:
        """The memory after all that was read, a value of its own."""
        recent = self._hidden[:, :, self._end - self.slots : self._end].transpose(0, 1)
        length = self._length.to(recent.device)
        valid = in_use(self.slots, length)[:, None, :, None]
        return TransformerXLMemory(
            tokens_seen=self._tokens_seen,
            # A copy: a view would keep the whole buffer alive. Empty slots are zero.
            hidden=recent.where(valid, recent.new_zeros(())).contiguous(),
            length=length,
        )

    def read(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        """``[B, T, D] -> [B, T, D]``, the backbone's output; the reader then stands after ``x``.

        ``starts``: bool ``[B, T]``, true where a document begins (None: nowhere).
        """
        if not x.numel():
            return self.backbone.final_norm(x)
        n_new = x.shape[1]
        _, documents = documents_of(x, starts)
        self._make_room(n_new)
        self._attention.cover(self.slots + n_new, self.slots)
        # Rows of one length need no mask over memory: only its valid end is looked at.
        valid = self.slots if self._uniform is None else self._uniform
        mask = None
        span = self._attention.span
        if n_new > 1 or self._uniform is None or span.attention == "fixed" or documents is not None:
            used = self._length.to(x.device)
            mask = span.visible(used, n_new, valid, self.slots, documents)
        seen, new = slice(self._end - valid, self._end + n_new), slice(self._end, self._end + n_new)
        h = x
        for n, layer in enumerate(self.backbone.stack()):
            self._hidden[n, :, new] = h
            q, k, v = self._attention.project(n, h)
            self._keys[n][:, :, new] = k
            self._values[n][:, :, new] = v
            k, v = self._keys[n][:, :, seen], self._values[n][:, :, seen]
            h = layer.residual(h, self._attention.attend(n, q, k, v, mask))
        self._end += n_new
        self._count(n_new, documents)
        return self.backbone.final_norm(h)

    def _count(self, n_new: int, documents: Documents | None) -> None:
        self._tokens_seen = count_after(self._tokens_seen, n_new, documents)
        if documents is None and self._uniform == self.slots:
            return
        length = self._length if documents is None else self._length.to(documents.n_last.device)
        self._length = count_after(length, n_new, documents).cpu().clamp(max=self.slots)
        self._uniform = _uniform(self._length)

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


def _uniform(length: Tensor) -> int | None:
    """The one number of all rows, if there is one."""
    lengths = set(length.tolist())
    return lengths.pop() if len(lengths) == 1 else None
