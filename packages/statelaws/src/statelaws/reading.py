"""Calls a model, and writes down what it calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from statelaws.case import Case, Named, written
from statelaws.errors import NotOfferedError, RefusedError
from statelaws.protocol import Stateful

FEW = 8
"""Tokens of a draw from the first or the last ids."""
LACKS = {
    "reset": "its rows cannot be reset",
    "read_packed": "it does not read packed inputs",
    "read_varlen": "it does not read rows laid end to end",
    "replay": "it has no replay of its own for training",
    "read_padded": "it does not read padded inputs",
    "truncate": "it cannot be rolled back",
    "save": "its states cannot be saved",
}
"""Phrases about a model without an optional function, by its name."""


class Reading:
    """Calls a model, and writes down what it calls.

    ``x`` are the case's inputs, ``[rows, tokens]``; ``other`` are as long, with two more rows, for
    anything else to read.
    """

    def __init__(self, model: Stateful[Any], case: Case, seed: int, folder: Path) -> None:
        self.model = model
        self.case = case
        self.lines: list[str] = []
        self._folder = folder
        self._count = 0
        generator = torch.Generator().manual_seed(seed + (case.draw << 32))
        self.x = self._drawn("x", case.rows, generator)
        self.other = self._drawn("other", case.rows + 2, generator)

    def _drawn(self, name: str, rows: int, generator: torch.Generator) -> Named:
        inputs = self.model.inputs
        shape = (rows, self.case.tokens)
        seed = int(torch.randint(2**31, (), generator=generator))
        among = self._among if name == "other" else lambda tokens: tokens
        value = among(inputs.draw(*shape, torch.Generator().manual_seed(seed)))
        tokens = inputs.plain and inputs.vocab_size is not None
        for _ in range(20 if tokens else 0):
            # With few tokens, rows may begin alike, or end like those that they are compared with.
            alike = rows > 1 and bool((value[0, 0] == value[:, 0]).all())
            if name == "other" and not alike:
                alike = bool((value[: self.case.rows, -1] == self.x.value[:, -1].cpu()).all())
            if not alike:
                break
            value = among(inputs.draw(*shape, generator))
        if tokens:
            text = written(value)
        else:
            text = inputs.code(*shape, f"torch.Generator().manual_seed({seed})")
        device = device_of(self.model)
        text += f".to({str(device)!r})" if device.type != "cpu" else ""
        self.lines.append(f"{name} = {text}")
        return Named(value.to(device), name)

    def _among(self, tokens: Tensor) -> Tensor:
        """``tokens`` among the ids of the case's draw."""
        size = self.model.inputs.vocab_size if self.model.inputs.plain else None
        if size is None or self.case.draw not in (2, 3):
            return tokens
        few = tokens % min(size, FEW)
        return few if self.case.draw == 2 else size - 1 - few

    def given(self, value: Any, text: str, name: str = "s") -> Named:
        """A computed value, under a new name."""
        self._count += 1
        self.lines.append(f"{name}{self._count} = {text}")
        return Named(value, f"{name}{self._count}")

    def _call(self, name: str, *arguments: Any) -> tuple[Any, str]:
        """Call the model's function; returns its result, and the call as a script writes it."""
        function = getattr(self.model, name, None)
        if function is None:
            raise NotOfferedError(LACKS[name])
        values = [each.value if isinstance(each, Named) else each for each in arguments]
        device = self.x.value.device
        values = [each.to(device) if isinstance(each, Tensor) else each for each in values]
        return called(function, *values), f"{name}({', '.join(map(written, arguments))})"

    def outputs(self, name: str, inputs: Named, *arguments: Any) -> tuple[Named, Named]:
        """Call a function that returns outputs and the state after them."""
        if not self.model.inputs.plain:
            inputs = Named(
                self.model.inputs.given(inputs.value), given_text(self.model, inputs.text)
            )
        result, text = self._call(name, inputs, *arguments)
        pair = isinstance(result, tuple) and len(result) == 2
        if not pair or not isinstance(result[0], Tensor) or not result[0].is_floating_point():
            raise RefusedError(
                f"{name} does not return a pair of floating-point outputs and a state"
            )
        if result[0].dim() < 2:
            raise RefusedError(
                f"{name} returns outputs of shape {list(result[0].shape)}, where [B, T, ...] is needed"
            )
        self._count += 1
        n = self._count
        self.lines.append(f"y{n}, s{n} = {text}")
        return Named(result[0], f"y{n}"), Named(result[1], f"s{n}")

    def replayed(self, inputs: Named, state: Named, starts: Tensor) -> Named:
        """The outputs of a window, as training computes them."""
        inputs = self._as_given(inputs)
        outputs = self.given(*self._call("replay", inputs, state, starts), name="y")
        if not isinstance(outputs.value, Tensor):
            raise RefusedError("replay does not return outputs alone")
        return outputs

    def _as_given(self, inputs: Named) -> Named:
        if self.model.inputs.plain:
            return inputs
        return Named(self.model.inputs.given(inputs.value), given_text(self.model, inputs.text))

    def state(self, name: str, *arguments: Any) -> Named:
        """Call a function that returns a state."""
        return self.given(*self._call(name, *arguments))

    def start(self, rows: int | None = None) -> Named:
        return Named(*self._call("start", self.case.rows if rows is None else rows))

    def read(self, inputs: Named, state: Named, own: bool = True) -> tuple[Named, Named]:
        """``own``: a copy of the inputs, which the call may spoil."""
        inputs = Named(inputs.value.clone(), inputs.text) if own else inputs
        return self.outputs("read", inputs, state)

    def read_all(
        self, inputs: Named, pieces: Iterable[int], state: Named | None = None
    ) -> tuple[list[Named], Named]:
        """Read the first ``sum(pieces)`` of ``inputs``, a call for each of ``pieces`` that is not 0."""
        state = self.start(len(inputs.value)) if state is None else state
        outputs = []
        at = 0
        tokens = inputs.value.shape[1]
        for piece in filter(None, pieces):
            stop = at + piece
            part = inputs[:, at or None : stop if stop < tokens else None]
            output, state = self.read(part if piece < tokens else inputs, state)
            outputs.append(output)
            at = stop
        return outputs, state

    def saved(self, state: Named) -> Named:
        """``state``, saved to a file and loaded from it."""
        path = self._folder / f"state{len(list(self._folder.iterdir()))}"
        file = Named(path, "Path('state')")
        self.lines.append(self._call("save", state, file)[1])
        return self.state("load", file)


def reads(model: Stateful[Any]) -> Callable[[Tensor, Any], tuple[Tensor, Any]]:
    """The model's ``read``, of inputs as the laws draw them."""
    return lambda inputs, state: called(model.read, model.inputs.given(inputs), state)


def given_text(model: Stateful[Any], text: str) -> str:
    """Write inputs as a script gives them to a model's functions."""
    return text if model.inputs.plain else f"given({text})"


def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a model's function; turn an exception that would end the program into an error."""
    try:
        return function(*arguments)
    except (SystemExit, GeneratorExit) as error:
        raise RefusedError(f"it raised {type(error).__name__}") from error


ITSELF = "its module is a part of itself: let module be a property that returns self"
"""Refusal of an ``nn.Module`` with ``self.module = self``."""


def device_of(model: Stateful[Any]) -> torch.device:
    """The device of a model."""
    tensors = (*model.module.parameters(), *model.module.buffers())
    return tensors[0].device if tensors else torch.device("cpu")
