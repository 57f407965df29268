"""Memory as the cache that ``generate`` carries from call to call."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import ClassVar, Self

import torch
from torch import Tensor
from transformers import Cache

from memspan.errors import MemspanError, StaleReaderError, counted
from memspan.memory import Memory
from memspan.models import LanguageModel, Reader


class MemspanCache(Cache):
    """A memory as a cache: ``cache`` of a :class:`MemspanForCausalLM`, and of ``generate``.

    The model reads on from it and moves it on. The memory in it is a value, so a copy of the cache is a
    branch of the text and costs nothing.

    Args:
        memory: what was read before (None: nothing).

    Example::

        memory = model.model.load_memory("book.memory")
        model.generate(**inputs, cache=MemspanCache(memory))
    """

    is_croppable = False
    """A memory cannot go back."""
    is_linear: ClassVar[list[bool]] = [False]
    """Caches of linear attention alone are not asked how many columns they have read."""

    def __init__(self, memory: Memory | None = None) -> None:
        super().__init__(layers=[])
        self._reader: Reader | None = None
        self.memory = memory
        self._model: LanguageModel | None = None
        self._columns = 0
        self.last_logits: Tensor | None = None
        """Logits after each row's last token, ``[B, V]`` (None: this cache has read nothing)."""

    @property
    def memory(self) -> Memory | None:
        """The memory of all that was read: a value that later reading does not change."""
        return self._memory if self._reader is None else self._reader.memory

    @memory.setter
    def memory(self, memory: Memory | None) -> None:
        self._memory = memory
        self._reader = None
        # Asked for with every token, where making the memory would take time.
        self._rows = -1 if memory is None else memory.batch_size

    def bind(self, model: LanguageModel, rows: int) -> None:
        """Bind to the first model that reads through this cache, with this many rows.

        Raises:
            MemspanError: another model, or another number of rows.
        """
        if self._model not in (None, model):
            raise MemspanError(
                "the cache is of another model: start with a new one, MemspanCache()"
            )
        if self._rows not in (-1, rows):
            raise MemspanError(
                f"the cache has {counted(self._rows, 'row')} and the input {rows}: pick or repeat its "
                "rows with batch_select_indices or batch_repeat_interleave, or start with a new one"
            )
        self._model = model
        self._rows = rows

    def read(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, T, V]`` of ``tokens [B, T]``, by a reader that is kept until the memory is
        replaced or the model has changed."""
        assert self._model is not None
        if self._reader is not None:
            with suppress(StaleReaderError):
                return self._reader.read(tokens)
        self._reader = self._model.reader(self.memory, self._rows)
        return self._reader.read(tokens)

    def count(self, n_columns: int, last_logits: Tensor | None) -> None:
        """Count columns that were read, padding included, and keep ``last_logits [B, V]``."""
        self._columns += n_columns
        # A copy: a view would keep the logits of all columns.
        self.last_logits = None if last_logits is None else last_logits.detach().clone()

    def detach_(self) -> Self:
        """Cut the memory from the graph, in training: gradients stop between segments."""
        memory = self.memory
        self.memory = None if memory is None else memory.detach()
        return self

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of ``input_ids`` that were read through this cache, padding included."""
        return self._columns

    @property
    def batch_size(self) -> int:
        """Rows; -1 if nothing was read."""
        return self._rows

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Pick, repeat or reorder rows: ``beam_idx``, int64 ``[B']``."""
        memory = self.memory
        if memory is not None:
            rows = beam_idx.to(memory.tokens_seen.device, torch.int64)
            self.memory = memory.select(rows)
            self.last_logits = None if self.last_logits is None else self.last_logits[rows]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Pick rows by number, int64 ``[B']``, or by a mask, bool ``[B]``."""
        self.reorder_cache(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row, before beam search or several samples of one prompt."""
        self.reorder_cache(torch.arange(max(self._rows, 0)).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget everything."""
        self.__init__()  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        """Refused.

        Raises:
            MemspanError: always.
        """
        raise MemspanError(
            "a memory cannot be cropped, since it does not keep its tokens: copy the cache before "
            "reading tokens that may have to be taken back"
        )

    def __copy__(self) -> MemspanCache:
        other = MemspanCache(self.memory)
        other._model = self._model
        other._columns = self._columns
        other.last_logits = self.last_logits
        return other

    def __getstate__(self) -> dict[str, object]:
        """The memory and the last logits, without model and reader: pickled, and counted as state."""
        return {**vars(self), "_memory": self.memory, "_reader": None, "_model": None}

    def __deepcopy__(self, memo: dict[int, object]) -> MemspanCache:
        state = self.__getstate__()
        memory = self.memory
        if memory is not None and any(t.requires_grad for t in memory.tensors().values()):
            # A copy is no part of the graph.
            state["_memory"] = memory.detach()
        other = MemspanCache()
        other.__dict__.update(copy.deepcopy(state, memo), _model=self._model)
        return other

    def __repr__(self) -> str:
        return f"MemspanCache({self.memory})"
