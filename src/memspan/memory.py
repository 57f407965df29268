"""What every architecture carries from one segment to the next: a value, batch first, of fixed size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from memspan.errors import MemspanError
from memspan.tensor_files import load_tensors, save_tensors


@dataclasses.dataclass(frozen=True)
class Memory:
    """Base of the architectures' memories: a frozen dataclass whose fields are all tensors.

    Every field has the batch first, a fixed size, and all-zero rows where nothing was read, so that
    the operations below need no knowledge of the architecture. No operation changes the memory it
    is called on: a stream can be branched by keeping the old value.
    """

    tokens_seen: Tensor
    """Tokens read since the row was last empty, int64 ``[B]``."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The memory with ``function`` applied to every field."""
        return dataclasses.replace(
            self, **{name: function(tensor) for name, tensor in self.tensors().items()}
        )

    def detach(self) -> Self:
        """Cut from the graph: truncated back-propagation through time."""
        return self.map(Tensor.detach)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Move to a device; ``dtype`` applies to floating-point fields only."""
        return self.map(lambda t: t.to(device, dtype if t.is_floating_point() else None))

    def select(self, rows: Tensor | list[int]) -> Self:
        """Pick, repeat or reorder rows: beam search, batch surgery. ``rows``: int64 ``[B']``."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.tokens_seen.device)
        return self.map(lambda t: t.index_select(0, index))

    def reset(self, mask: Tensor | list[bool]) -> Self:
        """Empty the rows where ``mask`` (bool ``[B]``) is true; the others are untouched."""
        empty = torch.as_tensor(mask, dtype=torch.bool, device=self.tokens_seen.device)
        if empty.shape != (self.batch_size,):
            raise MemspanError(
                f"reset needs one bool per row, [{self.batch_size}], not {list(empty.shape)}"
            )
        # where, not multiplication: a row that holds NaN is to be forgotten too.
        return self.map(
            lambda t: torch.where(empty.view(-1, *[1] * (t.dim() - 1)), t.new_zeros(()), t)
        )

    @property
    def batch_size(self) -> int:
        return self.tokens_seen.shape[0]

    @property
    def nbytes(self) -> int:
        """Size in bytes; the same whatever the number of tokens read."""
        return sum(t.nbytes for t in self.tensors().values())

    def save(self, path: str | Path, fingerprint: str) -> None:
        """Write as safetensors. ``fingerprint``: the model's, ``model.fingerprint()``."""
        header = {"kind": type(self).__name__, "fingerprint": fingerprint}
        # Fields may be one tensor, as the counts of an empty memory are.
        tensors = {name: tensor.clone() for name, tensor in self.tensors().items()}
        save_tensors(Path(path), tensors, header)

    @classmethod
    def load(cls, path: str | Path, fingerprint: str) -> Self:
        """Read what :meth:`save` wrote.

        Raises:
            MemspanError: the file is missing, damaged, no memory, or belongs to another model.
        """
        tensors, header = load_tensors(Path(path))
        if "kind" not in header or "fingerprint" not in header:
            raise MemspanError(f"{path} holds no memory: give a file that --save-memory wrote")
        if header["kind"] != cls.__name__ or header["fingerprint"] != fingerprint:
            raise MemspanError(
                f"{path} is the memory of another model ({header['kind']} of "
                f"{header['fingerprint'][:12]}, this is {cls.__name__} of {fingerprint[:12]}): "
                "use it with the run that wrote it"
            )
        return cls.from_tensors(tensors)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Self:
        """The inverse of :meth:`tensors`."""
        if set(tensors) != {f.name for f in dataclasses.fields(cls)}:
            raise MemspanError(f"these are no fields of a {cls.__name__}: {sorted(tensors)}")
        return cls(**tensors)

    def tensors(self) -> dict[str, Tensor]:
        """All fields by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
