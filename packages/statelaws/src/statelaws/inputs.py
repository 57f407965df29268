"""The inputs of a model: what the laws draw, and what the model is given.

Laws cut, mask, join and permute one tensor ``[B, T, ...]``. Tokens and vectors are that tensor; of
anything else it holds all numbers of a step side by side, and the model is given its parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_EXACT = 1 << 24
"""Integers below are exact in float32."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of a model: tokens, vectors, other arrays, or several of these by name.

    ``B`` is the number of rows, ``T`` that of steps.

    Raises:
        ValueError: it is not exactly one of these.
    """

    vocab_size: int | None = None
    """Tokens are int64 ``[B, T]`` in ``0 .. vocab_size - 1``."""
    width: int | None = None
    """Vectors are floating-point ``[B, T, width]``."""
    dtype: torch.dtype = torch.float32
    """Type of vectors and arrays."""
    shape: tuple[int, ...] | None = None
    """Arrays, such as images, are floating-point ``[B, T, *shape]``."""
    parts: Mapping[str, Inputs] = field(default_factory=dict)
    """Several inputs, such as an observation and the last action: ``read`` is given a dictionary."""
    per_output: int = 1
    """Inputs for each output, as of an encoder with strides: ``read`` is given ``[B, T * per_output,
    ...]`` and returns ``T`` outputs. Laws count outputs."""

    def __post_init__(self) -> None:
        kinds = (self.vocab_size is not None, self.width is not None, self.shape is not None)
        if sum((*kinds, bool(self.parts))) != 1:
            raise ValueError("Inputs takes one of vocab_size, width, shape and parts")
        if self.per_output < 1:
            raise ValueError(f"Inputs.per_output must be at least 1, not {self.per_output}")

    @property
    def plain(self) -> bool:
        """True if the model is given the tensor as it is drawn."""
        return self.shape is None and not self.parts and self.per_output == 1

    def draw(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """Random inputs of this many rows and steps, in one tensor (see :meth:`given`)."""
        if self.plain and self.vocab_size is not None:
            return torch.randint(self.vocab_size, (rows, length), generator=generator)
        return self._drawn(rows, length, generator).to(self._dtype)

    def given(self, drawn: Tensor) -> Any:
        """The inputs that the model reads, of any number of steps of those that were drawn."""
        if self.plain:
            return drawn
        # Steps first, then what is of one step: views where the type stays.
        steps = drawn.unflatten(2, (self.per_output, -1)).flatten(1, 2)
        return self._divided(steps)

    def code(self, rows: int, length: int, generator: str = "generator") -> str:
        """Python that draws the same from a generator of that name."""
        if not self.plain:
            return f"model.inputs.draw({rows}, {length}, {generator})"
        if self.vocab_size is not None:
            return f"torch.randint({self.vocab_size}, ({rows}, {length}), generator={generator})"
        text = f"torch.randn({rows}, {length}, {self.width}, generator={generator})"
        return text if self.dtype == torch.float32 else f"{text}.to({self.dtype})"

    def _drawn(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        if self.parts:
            n = length * self.per_output
            several = [part._drawn(rows, n, generator) for part in self.parts.values()]
            return torch.cat([each.to(self._dtype) for each in several], 2).reshape(
                rows, length, -1
            )
        size = (rows, length, self.per_output * self._numbers)
        if self.vocab_size is not None:
            return torch.randint(self.vocab_size, size, generator=generator)
        return torch.randn(size, generator=generator)

    def _divided(self, steps: Tensor) -> Any:
        if self.parts:
            sizes = [part.per_output * part._numbers for part in self.parts.values()]
            several = zip(self.parts.items(), steps.split(sizes, 2), strict=True)
            return {
                name: part._divided(each.unflatten(2, (part.per_output, -1)).flatten(1, 2))
                for (name, part), each in several
            }
        if self.vocab_size is not None:
            return steps[..., 0].long()
        steps = steps.to(self.dtype)
        return steps if self.shape is None else steps.reshape(*steps.shape[:2], *self.shape)

    @property
    def _numbers(self) -> int:
        """The number of numbers of one input."""
        if self.parts:
            return sum(part.per_output * part._numbers for part in self.parts.values())
        return 1 if self.vocab_size is not None else self.width or math.prod(self.shape or ())

    @property
    def _dtype(self) -> torch.dtype:
        """A type that holds all numbers of a step exactly."""
        if not self.parts and self.vocab_size is None:
            return self.dtype
        if self.vocab_size is not None:
            return torch.float32 if self.vocab_size <= _EXACT else torch.float64
        types = {part._dtype for part in self.parts.values()}
        return types.pop() if len(types) == 1 else torch.float64
