"""One case of a law, and values that a script knows by a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """An example to try a law with."""

    rows: int
    pieces: tuple[int, ...]
    """Tokens of the calls, in order; their purpose depends on the law."""
    variant: str = ""
    """The one of a law's several actions that is tried."""
    draw: int = 0
    """Number of the draw of inputs; with 2 and 3, other rows read the first and the last few token ids,
    which often have a special meaning."""
    extra: bool = False
    """More than a model need be made for, such as many rows: if it cannot be read, or shows nothing,
    the law is not the worse for it."""

    @property
    def tokens(self) -> int:
        return sum(self.pieces)

    def __str__(self) -> str:
        # Forty single tokens are summarised as one term.
        runs = [(n, len(list(equal))) for n, equal in groupby(filter(None, self.pieces))]
        pieces = " + ".join(f"{times} x {n}" if times > 1 else str(n) for n, times in runs)
        rows = f"{self.rows} row{'s' * (self.rows > 1)}"
        text = f"{rows} of {pieces} token{'s' * (self.tokens > 1)}"
        return f"{self.variant}: {text}" if self.variant else text


@dataclass(frozen=True)
class Named:
    """A value, and how a script writes it."""

    value: Any
    text: str

    def __getitem__(self, index: Any) -> Named:
        parts = index if isinstance(index, tuple) else (index,)
        parts = tuple(
            slice(None, part.stop) if isinstance(part, slice) and part.start == 0 else part
            for part in parts
        )
        if all(isinstance(part, slice) and part == slice(None) for part in parts):
            return self
        return Named(self.value[index], f"{self.text}[{', '.join(map(written, parts))}]")


def written(value: Any) -> str:
    """Write an argument or an index as a script does."""
    if isinstance(value, Named):
        return value.text
    if isinstance(value, Tensor):
        return f"torch.tensor({value.tolist()})"
    if isinstance(value, slice):
        return ":".join("" if end is None else str(end) for end in (value.start, value.stop))
    return repr(value)


def join(parts: Sequence[Named], dim: int = 1) -> Named:
    """``parts`` concatenated."""
    if len(parts) == 1:
        return parts[0]
    text = f"torch.cat([{', '.join(part.text for part in parts)}]"
    value = torch.cat([part.value for part in parts], dim)
    return Named(value, f"{text}, {dim})" if dim else f"{text})")
