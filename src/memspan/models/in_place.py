"""Base classes of readers that update their memory in place."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Generic

import torch
from torch import Tensor

from memspan.errors import NonFiniteError
from memspan.memory import Memory, Rows
from memspan.models.inputs import rows_not_finite
from memspan.models.packing import Watch
from memspan.models.protocol import Backbone
from memspan.models.readers import M, VectorReader, by_one_thread, not_copied
from memspan.trees import to_device


class BufferedReader(VectorReader, Generic[M]):
    """Keeps the memory of its rows in tensors that it writes to. It computes with weights past their
    modules, and refuses to read on after the weights have changed."""

    __reduce_ex__ = not_copied

    def __init__(self, backbone: Backbone[M], memory: M) -> None:
        super().__init__(backbone, memory.batch_size)
        self.watch = Watch(backbone)
        self._rows = Rows.of(memory)
        self._device = memory.tokens_seen.device
        self._tokens_seen = memory.tokens_seen

    @property
    def _tokens_seen(self) -> Tensor:
        """Tokens that each row has read: those when this was last set, and ``_n_read`` since, which
        takes no operation per token."""
        return self._seen_before + self._n_read

    @_tokens_seen.setter
    def _tokens_seen(self, seen: Tensor) -> None:
        self._seen_before = seen
        self._n_read = 0

    @property
    @by_one_thread
    def memory(self) -> M:
        """The memory after the last token: a copy, which reading on does not change."""
        return self._memory(slice(None), slice(None))

    @by_one_thread
    def select(self, rows: Tensor | list[int]) -> M:
        numbers = self._rows.numbers(rows)
        return self._memory(numbers, to_device(numbers, self._device))

    @abstractmethod
    def _memory(self, rows: Tensor | slice, at: Tensor | slice) -> M:
        """The memory of ``rows``, which are on the CPU, and ``at`` the same on the device."""

    def _read_vectors(self, x: Tensor, starts: Tensor | None) -> Tensor:
        self.watch.refuse_changes()
        if starts is None:
            return self._read(x)
        parts = []
        starts = starts.cpu()
        inside = starts.any(0).nonzero().flatten().tolist()
        for start, end in pairwise(sorted({0, *inside, x.shape[1]})):
            self.reset(starts[:, start])
            parts.append(self._read(x[:, start:end]))
        return torch.cat(parts, 1)

    @abstractmethod
    def _read(self, x: Tensor) -> Tensor:
        """Read a segment in which no document begins; without gradients."""

    @by_one_thread
    def reset(self, mask: Tensor | list[bool]) -> None:
        rows = self._rows.mask(mask).nonzero()
        if len(rows):
            self.watch.refuse_changes()
            rows = rows.squeeze(1)
            self._empty(rows, to_device(rows, self._device))

    @abstractmethod
    def _empty(self, rows: Tensor, at: Tensor) -> None:
        """Begin anew in ``rows``; ``at``: as in :meth:`_memory`."""

    @by_one_thread
    def replace(self, rows: Tensor | list[int], memory: Memory) -> None:
        self.watch.refuse_changes()
        numbers, given = self._rows.replacement(rows, memory)
        self._put(numbers, to_device(numbers, self._device), given)

    @abstractmethod
    def _put(self, rows: Tensor, at: Tensor, memory: M) -> None:
        """Go on from ``memory`` in ``rows``. Whatever may fail comes before the first change."""


class InPlaceReader(BufferedReader[M]):
    """Reads with constant memory and time per token.

    ``layered``: the memory's fields ``[B, L, ...]``, kept layer by layer and changed in place. The
    others have a number per row, and are replaced.
    """

    def __init__(self, backbone: Backbone[M], memory: M, layered: Sequence[str]) -> None:
        super().__init__(backbone, memory)
        self._dtype = torch.promote_types(self._expected[1].dtype, torch.float32)
        self._kind = type(memory)
        tensors = memory.tensors()
        # Copies, since they are changed in place; contiguous, as steps in C take them.
        self._layers = {
            name: [
                t.detach().to(self._dtype, copy=True, memory_format=torch.contiguous_format)
                for t in tensors.pop(name).unbind(1)
            ]
            for name in layered
        }
        del tensors["tokens_seen"]
        self._counts = tensors

    def _memory(self, rows: Tensor | slice, at: Tensor | slice) -> M:
        layered = {
            name: torch.stack([t[at] for t in parts], 1) for name, parts in self._layers.items()
        }
        counts = {name: t[at] for name, t in self._counts.items()}
        return self._kind(tokens_seen=self._tokens_seen[at], **counts, **layered)

    def _empty(self, rows: Tensor, at: Tensor) -> None:
        self._tokens_seen = self._tokens_seen.index_fill(0, at, 0)
        self._counts = {name: t.index_fill(0, at, 0) for name, t in self._counts.items()}
        for parts in self._layers.values():
            for tensor in parts:
                tensor.index_fill_(0, at, 0)

    def _put(self, rows: Tensor, at: Tensor, memory: M) -> None:
        tensors = memory.map(lambda t: to_device(t, self._device)).tensors()
        for name, parts in self._layers.items():
            for own, new in zip(parts, tensors.pop(name).unbind(1), strict=True):
                own.index_copy_(0, at, new.to(self._dtype))
        self._tokens_seen = self._tokens_seen.index_copy(0, at, tensors["tokens_seen"])
        self._counts = {
            name: own.index_copy(0, at, tensors[name]) for name, own in self._counts.items()
        }


def refuse_non_finite(output: Tensor) -> None:
    """Raise :class:`NonFiniteError` where ``output [B, T, D]`` is not finite: one such key or value has
    spoilt its row's matrices, and with them every later output. On a GPU checking would wait."""
    if rows := rows_not_finite(output):
        raise NonFiniteError(
            f"keys or values of rows {rows} are not finite, nor is what they wrote to memory: "
            "check the input, or read on from an earlier memory; in training, lower the learning rate, "
            "or with Fast Weights use normalisation sum, without which the delta rule may diverge"
        )
