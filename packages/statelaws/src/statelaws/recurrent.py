"""torch's recurrent modules, and functions of inputs and a state, as models that carry state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from statelaws.protocol import (
    MADE,
    PLAIN,
    Claims,
    Inputs,
    NotOfferedError,
    RefusedError,
    leaves_of,
    tensors_of,
)


def mapped(function: Callable[[Tensor], Tensor], state: Any) -> Any:
    """A state of any kind with ``function`` applied to its tensors; containers are copied."""
    # deepcopy takes a part's copy from its memo if it is there.
    return copy.deepcopy(state, {id(tensor): function(tensor) for tensor in tensors_of(state)})


def copied(state: Any) -> Any:
    """A copy of a state of any kind, without its gradients."""
    return mapped(lambda tensor: tensor.detach().clone(), state)


class Recurrent:
    """A :class:`torch.nn.RNN`, ``GRU`` or ``LSTM``.

    Args:
        module: it reads in one direction.
        made: Python that makes ``module``, for scripts.

    Raises:
        RefusedError: it reads in both directions, so no state can be carried on.
    """

    claims = Claims(padding=frozenset({"right"}))

    def __init__(self, module: nn.RNNBase, made: str = MADE) -> None:
        if module.bidirectional:
            raise RefusedError(
                f"a bidirectional {type(module).__name__} reads the end of a text first, so it cannot "
                "be read on from a state: make it with bidirectional=False"
            )
        self.module: nn.Module = module
        self._rnn, self._made = module, made
        self.inputs = Inputs(width=module.input_size, dtype=next(module.parameters()).dtype)

    def start(self, batch_size: int) -> Any:
        """All zeros, like the module's own default."""
        weight, layers = next(self._rnn.parameters()), self._rnn.num_layers
        width = self._rnn.proj_size or self._rnn.hidden_size
        hidden = weight.new_zeros(layers, batch_size, width)
        if not isinstance(self._rnn, nn.LSTM):
            return hidden
        return hidden, weight.new_zeros(layers, batch_size, self._rnn.hidden_size)

    def read(self, inputs: Tensor, state: Any) -> tuple[Tensor, Any]:
        if self._rnn.batch_first:
            return self._rnn(inputs, state)
        outputs, state = self._rnn(inputs.transpose(0, 1), state)
        return outputs.transpose(0, 1), state

    def read_padded(
        self, inputs: Tensor, state: Any, lengths: Tensor, side: Literal["right", "left"]
    ) -> tuple[Tensor, Any]:
        """By :func:`torch.nn.utils.rnn.pack_padded_sequence`, which supports padding on the right."""
        if side == "left":
            raise NotOfferedError("packed sequences have no padding on the left")
        packed = pack_padded_sequence(inputs, lengths.cpu(), True, enforce_sorted=False)
        outputs, state = self._rnn(packed, state)
        outputs, _ = pad_packed_sequence(outputs, True, total_length=inputs.shape[1])
        return outputs, state

    def select(self, state: Any, rows: Tensor) -> Any:
        return mapped(lambda part: part.index_select(1, rows), state)

    def copy(self, state: Any) -> Any:
        return copied(state)

    def source(self) -> str:
        both = isinstance(self._rnn, nn.LSTM)
        zeros = [
            f"torch.zeros({len(part)}, batch_size, {part.shape[2]}, dtype={part.dtype})"
            for part in tensors_of(self.start(1))
        ]
        turned = "" if self._rnn.batch_first else ".transpose(0, 1)"
        return f"""\
{self._made}


def start(batch_size):
    return {", ".join(zeros)}


def read(inputs, state):
    outputs, state = module(inputs{turned}, state)
    return outputs{turned}, state


def read_padded(inputs, state, lengths, side):
    rnn = torch.nn.utils.rnn
    packed = rnn.pack_padded_sequence(inputs, lengths.cpu(), True, enforce_sorted=False)
    outputs, state = module(packed, state)
    return rnn.pad_packed_sequence(outputs, True, total_length=inputs.shape[1])[0], state


def select(state, rows):
    return {"tuple(part[:, rows] for part in state)" if both else "state[:, rows]"}


def copy(state):
    return {"tuple(part.clone() for part in state)" if both else "state.clone()"}
"""


HOW = "statelaws.Stateful"
"""Where it says what that needs."""


@dataclass
class Function:
    """A function of inputs and a state.

    Example::

        Function(cell, lambda rows: torch.zeros(rows, 8), Inputs(width=4), module=cell)
    """

    function: Callable[[Tensor, Any], tuple[Tensor, Any]]
    """``function(inputs, state) -> (outputs, state)``."""
    first: Callable[[int], Any]
    """``first(batch_size)``: the state of rows that have read nothing."""
    inputs: Inputs
    module: nn.Module = field(default_factory=nn.Module)
    """The module with the weights, if any."""
    claims: Claims = field(default_factory=Claims)
    batch_dimension: int = 0
    """Dimension of rows in the state's tensors: 1 where time or layers come first."""
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
            parts, more = len(leaves_of(state)), len(leaves_of(self.first(batch_size + 1)))
            if parts != more:
                self._rows = f"its first state has {parts} parts, and {more} with a row more: "
        self._look_at(state, batch_size)
        return state

    def read(self, inputs: Tensor, state: Any) -> tuple[Tensor, Any]:
        result = self.function(inputs, state)
        if isinstance(result, tuple) and len(result) == 2:
            self._look_at(result[1], len(inputs))
        return result

    def _look_at(self, state: Any, rows: int) -> None:
        """Note what :meth:`select` and :meth:`copy` cannot do with a state of so many rows."""
        for part in leaves_of(state):
            if not isinstance(part, Tensor):
                if not self._unknown and not isinstance(part, PLAIN):
                    self._unknown = f"its state holds a {type(part).__name__}: "
            elif not self._rows and part.dim() and not self._has_rows(part, rows):
                others = [i for i, size in enumerate(part.shape) if size == rows]
                hint = f"give batch_dimension={others[0]} or " if len(others) == 1 else ""
                self._rows = (
                    f"its state of {rows} row{'s' * (rows > 1)} holds a tensor {list(part.shape)}, "
                    f"whose dimension {self.batch_dimension} is not that of rows: {hint}"
                )

    def _has_rows(self, part: Tensor, rows: int) -> bool:
        dimension = self.batch_dimension
        return -part.dim() <= dimension < part.dim() and part.shape[dimension] == rows

    def select(self, state: Any, rows: Tensor) -> Any:
        """The rows of all tensors but those without dimensions, which all rows share.

        Raises:
            RefusedError: some have no such rows, or the state holds more than tensors and numbers.
        """
        if problem := self._unknown or self._rows:
            raise RefusedError(f"{problem}write an object with a select of its own ({HOW})")
        return mapped(
            lambda part: part.index_select(self.batch_dimension, rows) if part.dim() else part,
            state,
        )

    def copy(self, state: Any) -> Any:
        """All of it, copied.

        Raises:
            RefusedError: the state holds more than tensors and numbers.
        """
        if self._unknown:
            raise RefusedError(f"{self._unknown}write an object with a copy of its own ({HOW})")
        return copied(state)
