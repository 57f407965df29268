"""The Feedback Transformer's recurrence for reading on, without gradients."""

from __future__ import annotations

from torch import Tensor

from memspan.ops.feedback.buffers import Call, FoldedWeights, Saved, mask_of_old_slots
from memspan.ops.feedback.recurrence import IMPLEMENTATIONS, Forward
from memspan.ops.implementations import choose


class StreamingLoop:
    """The loop for frozen weights and one number of rows. Its buffers are made once for a length."""

    def __init__(
        self, weights: FoldedWeights, batch: int, span: int, activation: str, eps: float
    ) -> None:
        tensors = [t.contiguous() for t in weights.tensors().values()]
        self.weights, self.batch = FoldedWeights.of(tensors, weights.norms_memory), batch
        # As large as calls become.
        self.call = Call(span, span, activation, eps)
        self.loops = choose(IMPLEMENTATIONS, None, weights.mix)(weights.mix)
        self.saved: Saved | None = None
        self._forward: Forward | None = None
        # Whether the last call had rows of different length.
        self._masked = False

    def read(
        self, x: Tensor, kv: Tensor, end: int, n_old: int, length: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Read ``x [B, T, D]``; its keys and values are written at ``end``.

        Args:
            kv: ``[2, G, H * B, N, K]`` of ``new_slots``, with room for ``T`` slots from ``end`` on.
            n_old: slots before ``end`` that the first token may see.
            length: int64 ``[B]``: how many of them a row has (None: all).

        Returns:
            The last layer's output ``[B, T, D]`` and the memory vectors ``[T, B, D]``, until the next
            call.
        """
        n_steps, additive_mask, has_memory = x.shape[1], None, None
        if length is not None:
            additive_mask, has_memory = mask_of_old_slots(length, n_old, x.dtype)
        if self.saved is None or self.saved.states.shape[1] != n_steps:
            self.saved = Saved.empty(self.weights, self.call, n_steps, self.batch, kv)
            self._forward = self.loops.prepare(self.saved, self.weights, self.call)
        assert self._forward is not None
        if self._masked or length is not None:
            self.saved.attended[:, 0, :, -1] = 1 if has_memory is None else has_memory
        self._masked = length is not None
        self.saved.states[0] = x.transpose(0, 1)
        call = self.call._replace(n_old=n_old, additive_mask=additive_mask, has_memory=has_memory)
        self._forward(call, kv, end - n_old)
        return self.saved.states[-1].transpose(0, 1), self.saved.vectors
