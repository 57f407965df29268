"""Memory, the value that an architecture carries from segment to segment: fixed size, batch first."""

from __future__ import annotations

import dataclasses
import os
import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Generic, Self, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data._utils.collate import default_collate_fn_map

from memspan.calls import names_checked
from memspan.errors import MemspanError, counted
from memspan.files.disk import path_of
from memspan.files.tensors import load_tensors, named, read_header, save_tensors, write_tensors
from memspan.trees import LayerMemory, check_like, described, form, per_row, row_mask, to_device

M = TypeVar("M", bound="Memory")
MOST_TOKENS = 1 << 62
"""Tokens that a row may have seen; counting on from more would overflow."""


@dataclasses.dataclass(frozen=True, repr=False)
class Memory(LayerMemory):
    """Base of the architectures' memories: a :class:`memspan.layers.LayerMemory` of all layers of a
    model, with the number of tokens read."""

    tokens_seen: Tensor
    """Tokens that each row has read since it was last empty, int64 ``[B]``."""

    def __repr__(self) -> str:
        seen = "tokens"
        if self.batch_size and not self.tokens_seen.is_meta:
            least = int(self.tokens_seen.min())
            most = int(self.tokens_seen.max())
            seen = counted(least, "token") if least == most else f"{least:,} to {most:,} tokens"
        rows = counted(self.batch_size, "row")
        return f"{type(self).__name__}({rows}, {seen} seen, {self.nbytes:,} bytes)"

    @names_checked
    def replace(self, rows: Tensor | list[int], other: Memory) -> Self:
        """The memory with row ``rows[i]`` replaced by row ``i`` of ``other``, for each ``i``.

        Args:
            rows: integers ``[B']``, each row at most once.
            other: ``B'`` rows, of the same sizes. It may be on another device.

        Raises:
            MemspanError: the rows or the memory are not as described here.
        """
        index, other = Rows.of(self).replacement(rows, other)
        fields = other.tensors()
        return dataclasses.replace(
            self,
            **{
                name: t.index_copy(
                    0, to_device(index, t.device), to_device(fields[name], t.device, t.dtype)
                )
                for name, t in self.tensors().items()
            },
        )

    @names_checked
    def save(self, path: str | Path | IO[bytes], fingerprint: str) -> None:
        """Write as safetensors. ``fingerprint``: the model's, ``model.fingerprint()``.

        Args:
            path: a path, or a file object that is open for writing bytes, such as ``io.BytesIO()``.

        Raises:
            MemspanError: ``path`` holds something other than a memory, or cannot be written.
        """
        header = {"kind": type(self).__name__, "fingerprint": fingerprint}
        if not isinstance(path, str | os.PathLike):
            write_tensors(path, self.tensors(), header)
            return
        path = path_of(path)
        refuse_to_overwrite(path, memories=False)
        save_tensors(path, self.tensors(), header)

    @classmethod
    @names_checked
    def load(
        cls, path: str | Path | IO[bytes], fingerprint: str, like: Memory | None = None
    ) -> Self:
        """Read what :meth:`save` wrote.

        Args:
            path: a path, or a file object, which is read to its end.
            like: one of the model's memories, for its sizes; if it has no rows, the file may
                have any number of them.

        Raises:
            MemspanError: the file is missing or damaged, is not a memory, or belongs to another model.
        """
        source = source_of(path)
        tensors, header = load_tensors(source)
        path = named(source)
        if "kind" not in header or "fingerprint" not in header:
            raise MemspanError(f"{path} is not a memory file: give one that --save-memory wrote")
        if header["kind"] != cls.__name__:
            raise MemspanError(
                f"{path} is a {header['kind']}, and this model's is a {cls.__name__}: use it with "
                "the run that wrote it"
            )
        # Before the fingerprint, since it cannot say what differs.
        memory = cls.from_tensors(tensors, like)
        if header["fingerprint"] != fingerprint:
            raise MemspanError(
                f"{path} is the memory of another model, with other options or other weights (of "
                f"{header['fingerprint'][:12]}, this is {fingerprint[:12]}): use it with the run "
                "that wrote it"
            )
        return memory

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], like: Memory | None = None) -> Self:
        """The inverse of :meth:`tensors`; refuses other fields, other sizes than those of ``like``, and
        impossible counts. If ``like`` has no rows, there may be any number of them."""
        if set(tensors) != {f.name for f in dataclasses.fields(cls)}:
            raise MemspanError(
                f"a {cls.__name__} has other fields than {sorted(tensors)}: load a file that "
                "memory.save wrote"
            )
        memory = cls(**tensors)
        if like is None:
            memory._count("tokens_seen", MOST_TOKENS)
        else:
            check_like(memory, like, like.batch_size or None)
            memory.counts()
        return memory

    def slots(self) -> dict[str, int]:
        """For each field that counts a row's valid slots, the number of all its slots."""
        return {}

    def counts(self) -> dict[str, Tensor]:
        """The fields that :meth:`slots` names, checked and on the CPU: loops in C trust them. The
        tokens are also checked."""
        self._count("tokens_seen", MOST_TOKENS)
        return {name: self._count(name, most) for name, most in self.slots().items()}

    def _count(self, name: str, most: int) -> Tensor:
        count: Tensor = getattr(self, name)
        wanted = f"the memory's {name} must be int64 [{self.batch_size}], in 0 .. {most:,}"
        if count.dtype != torch.int64 or count.shape != (self.batch_size,) or count.is_meta:
            raise MemspanError(f"{wanted}, not {form(count)}: use this model's memory")
        values = (count := count.cpu()).tolist()
        if values and not 0 <= min(values) <= max(values) <= most:
            raise MemspanError(
                f"{wanted}, not {min(values):,} .. {max(values):,}: use this model's memory"
            )
        return count


def concatenate(memories: Iterable[M]) -> M:
    """The rows of several memories, one after the other, as one memory. The inverse of ``memory[i]``.

    Raises:
        MemspanError: no memories, or of different architectures, sizes, types or devices.
    """
    memories = list(memories) if isinstance(memories, Iterable) else [memories]
    if not memories:
        raise MemspanError("concatenate needs at least one memory")
    if strangers := [each for each in memories if not isinstance(each, LayerMemory)]:
        raise MemspanError(
            f"concatenate takes a list of memories, not of {reprlib.repr(strangers[0])}"
        )
    first = memories[0]
    for other in memories[1:]:
        if type(other) is not type(first):
            raise MemspanError(
                f"concatenate needs memories of one model, not {described(first)} and "
                f"{described(other)}"
            )
        check_like(other, first, None, first.device)
    fields = [memory.tensors() for memory in memories]
    return dataclasses.replace(
        first, **{name: torch.cat([each[name] for each in fields]) for name in fields[0]}
    )


def _batch(memories: Any, **_: Any) -> Any:
    return concatenate(memories)


default_collate_fn_map[LayerMemory] = _batch
"""Batches of memories by ``torch.utils.data.default_collate``, and with it by a ``DataLoader``."""


@dataclasses.dataclass(frozen=True)
class Rows(Generic[M]):
    """The rows of a memory, whatever they hold: their numbers, and what may replace them."""

    count: int
    like: M
    """Such a memory without rows."""

    @classmethod
    def of(cls, memory: M) -> Rows[M]:
        """The rows of ``memory``."""
        return cls(memory.batch_size, memory.map(lambda t: t.new_empty(0, *t.shape[1:])))

    def mask(self, mask: Tensor | list[bool]) -> Tensor:
        """``mask`` as bool ``[B]`` on the CPU; refused if it is not one bool per row."""
        return row_mask(mask, self.count, "cpu")

    def numbers(self, rows: Tensor | list[int], once: bool = False) -> Tensor:
        """``rows`` as int64 ``[B']`` on the CPU, in any order, repeated or not unless ``once``; refused
        if one does not exist."""
        what = f"row numbers in 0 .. {self.count - 1}"
        wanted = f"replace needs {what}, each at most once" if once else f"select needs {what}"
        found = per_row(rows, torch.int64, wanted, "cpu")
        outside = ((found < 0) | (found >= self.count)).any()
        if outside or (once and len(found.unique()) < len(found)):
            raise MemspanError(f"{wanted}, not {found.tolist()}")
        return found

    def replacement(self, rows: Tensor | list[int], memory: Memory) -> tuple[Tensor, M]:
        """The numbers of rows, int64 ``[B']`` on the CPU, and the memory that may replace them: one of
        this architecture and these sizes, with possible counts."""
        found = self.numbers(rows, once=True)
        if isinstance(memory, Memory) and memory.batch_size != len(found):
            raise MemspanError(
                f"the memory has {counted(memory.batch_size, 'row')}, to replace {len(found)}: give as "
                "many, memory.select picks rows"
            )
        check_like(memory, self.like, len(found))
        memory.counts()
        return found, cast(M, memory)


def source_of(path: str | Path | IO[bytes]) -> Path | IO[bytes]:
    """A path, or a file object; anything else is refused."""
    if isinstance(path, str | os.PathLike):
        return path_of(path)
    if not hasattr(path, "read"):
        raise MemspanError(
            f"a memory is loaded from a path or a file object, not from {described(path)}: for bytes, "
            "give io.BytesIO(content)"
        )
    return path


def refuse_to_overwrite(path: Path, *, memories: bool) -> None:
    """Refuse a path that holds anything but a memory or, with ``memories``, anything at all."""
    if not os.path.lexists(path) or (path.is_file() and path.stat().st_size == 0):
        return
    if not path.is_file() or not {"kind", "fingerprint"} <= read_header(path).keys():
        raise MemspanError(f"{path} exists and is not a memory file: choose another path")
    if memories:
        raise MemspanError(
            f"{path} already holds a memory: choose another path, or overwrite it with --force"
        )
