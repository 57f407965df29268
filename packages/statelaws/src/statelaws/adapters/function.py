"""Functions of inputs and a state, as models that carry state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from statelaws.errors import RefusedError
from statelaws.inputs import Inputs
from statelaws.protocol import Claims
from statelaws.states import PLAIN, copied, leaves_of, mapped, tensors_of

HOW = "statelaws.Stateful"
"""Where it says what that needs."""


def by_steps(
    step: Callable[[Any, Any], tuple[Tensor, Any]],
) -> Callable[[Any, Any], tuple[Tensor, Any]]:
    """Make a function that reads inputs ``[B, T, ...]``, of at least one step, from one that reads a
    single step: ``step(inputs [B, ...], state) -> (outputs [B, ...], state)``."""

    def read(inputs: Any, state: Any) -> tuple[Tensor, Any]:
        outputs = []
        for t in range(tensors_of(inputs)[0].shape[1]):
            y, state = step(mapped(itemgetter((slice(None), t)), inputs), state)
            outputs.append(y)
        return torch.stack(outputs, 1), state

    return read


@dataclass
class Function:
    """A function of inputs and a state. A subclass may add what else a model offers, such as
    ``read_packed``.

    Example::

        Function(cell, lambda rows: torch.zeros(rows, 8), Inputs(width=4), module=cell)
    """

    function: Callable[[Any, Any], tuple[Tensor, Any]]
    """``function(inputs, state) -> (outputs, state)``."""
    first: Callable[[int], Any]
    """``first(batch_size)``: the state of rows that have read nothing."""
    inputs: Inputs
    module: nn.Module = field(default_factory=nn.Module)
    """The module with the weights, if any."""
    claims: Claims = field(default_factory=Claims)
    batch_dimension: int | Callable[[Tensor], int] = 0
    """Dimension of rows in the state's tensors: 1 where time or layers come first. A function of a
    tensor says it of each."""
    _unknown: str = field(default="", init=False, repr=False, compare=False)
    """The part of its state that cannot be copied here, once that has been seen."""
    _rows: str = field(default="", init=False, repr=False, compare=False)
    """Why :meth:`select` cannot tell its rows apart, once that has been seen: a length may be the
    number of rows by chance."""
    _compared: bool = field(default=False, init=False, repr=False, compare=False)

    def start(self, batch_size: int) -> Any:
        state = self.first(batch_size)
        if not self._compared:
            self._compared = True
            parts = len(leaves_of(state))
            more = len(leaves_of(self.first(batch_size + 1)))
            if parts != more:
                self._rows = f"its first state has {parts} parts, and {more} with a row more: "
        self._look_at(state, batch_size)
        return state

    def read(self, inputs: Any, state: Any) -> tuple[Tensor, Any]:
        result = self.function(inputs, state)
        if isinstance(result, tuple) and len(result) == 2 and (given := tensors_of(inputs)):
            self._look_at(result[1], len(given[0]))
        return result

    def _look_at(self, state: Any, rows: int) -> None:
        """Note why :meth:`select` or :meth:`copy` cannot handle a state of this many rows."""
        for part in leaves_of(state):
            if not isinstance(part, Tensor):
                if not self._unknown and not isinstance(part, PLAIN):
                    self._unknown = f"its state holds a {type(part).__name__}: "
            elif not self._rows and part.dim() and not self._has_rows(part, rows):
                others = [i for i, size in enumerate(part.shape) if size == rows]
                hint = f"give batch_dimension={others[0]} or " if len(others) == 1 else ""
                self._rows = (
                    f"its state of {rows} row{'s' * (rows > 1)} holds a tensor {list(part.shape)}, "
                    f"whose dimension {self._dimension(part)} is not that of rows: {hint}"
                )

    def _dimension(self, part: Tensor) -> int:
        given = self.batch_dimension
        return given(part) if callable(given) else given

    def _has_rows(self, part: Tensor, rows: int) -> bool:
        dimension = self._dimension(part)
        return -part.dim() <= dimension < part.dim() and part.shape[dimension] == rows

    def select(self, state: Any, rows: Tensor) -> Any:
        """The rows of all tensors but those without dimensions, which all rows share.

        Raises:
            RefusedError: some have no such rows, or the state holds more than tensors and numbers.
        """
        if problem := self._unknown or self._rows:
            raise RefusedError(f"{problem}write an object with a select of its own ({HOW})")

        def rows_of(part: Tensor) -> Tensor:
            return part.index_select(self._dimension(part), rows) if part.dim() else part

        try:
            return mapped(rows_of, state)
        except RefusedError as error:
            raise RefusedError(
                f"{error}: write an object with a select of its own ({HOW})"
            ) from None

    def copy(self, state: Any) -> Any:
        """Copy the whole state.

        Raises:
            RefusedError: the state holds more than tensors and numbers.
        """
        if self._unknown:
            raise RefusedError(f"{self._unknown}write an object with a copy of its own ({HOW})")
        return copied(state)
