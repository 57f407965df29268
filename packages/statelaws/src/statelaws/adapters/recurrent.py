"""torch's recurrent modules, as models that carry state."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import Tensor, nn

from statelaws.errors import NotOfferedError, RefusedError
from statelaws.inputs import Inputs
from statelaws.protocol import MADE, Claims
from statelaws.script import Functions, by_name, source_of


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
        self.inputs = Inputs(width=module.input_size, dtype=next(module.parameters()).dtype)
        self._functions = _functions(module)
        self._made = made

    def start(self, batch_size: int) -> Any:
        """All zeros, like the module's own default."""
        return self._functions["start"](batch_size)

    def read(self, inputs: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self._functions["read"](inputs, state)

    def read_padded(
        self, inputs: Tensor, state: Any, lengths: Tensor, side: Literal["right", "left"]
    ) -> tuple[Tensor, Any]:
        """Read with :func:`torch.nn.utils.rnn.pack_padded_sequence`, for padding on the right."""
        if side == "left":
            raise NotOfferedError("packed sequences have no padding on the left")
        return self._functions["read_padded"](inputs, state, lengths, side)

    def select(self, state: Any, rows: Tensor) -> Any:
        return self._functions["select"](state, rows)

    def copy(self, state: Any) -> Any:
        return self._functions["copy"](state)

    def source(self, names: Collection[str]) -> str:
        return "\n\n".join([self._made, source_of(self._functions, names)])


def _functions(module: nn.RNNBase) -> Functions:
    """The functions of the protocol; scripts are made from them as well."""

    def start(batch_size: int) -> Any:
        weight = next(module.parameters())
        width = module.proj_size or module.hidden_size
        hidden = weight.new_zeros(module.num_layers, batch_size, width)
        if not isinstance(module, torch.nn.LSTM):
            return hidden
        return hidden, weight.new_zeros(module.num_layers, batch_size, module.hidden_size)

    def read(inputs: Tensor, state: Any) -> tuple[Tensor, Any]:
        if module.batch_first:
            return module(inputs, state)
        outputs, state = module(inputs.transpose(0, 1), state)
        return outputs.transpose(0, 1), state

    def read_padded(inputs: Tensor, state: Any, lengths: Tensor, side: str) -> tuple[Tensor, Any]:
        rnn = torch.nn.utils.rnn
        packed = rnn.pack_padded_sequence(inputs, lengths.cpu(), True, enforce_sorted=False)
        outputs, state = module(packed, state)
        return rnn.pad_packed_sequence(outputs, True, total_length=inputs.shape[1])[0], state

    def select(state: Any, rows: Tensor) -> Any:
        if isinstance(state, tuple):
            return tuple(part.index_select(1, rows) for part in state)
        return state.index_select(1, rows)

    def copy(state: Any) -> Any:
        if isinstance(state, tuple):
            return tuple(part.detach().clone() for part in state)
        return state.detach().clone()

    return by_name(start, read, read_padded, select, copy)
