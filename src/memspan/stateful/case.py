"""One case of a law: its calls, and a script that makes the same calls."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from memspan.stateful.protocol import (
    NotOfferedError,
    ReadsPacked,
    ReadsPadded,
    RefusedError,
    Reproduces,
    Resets,
    Saves,
    Stateful,
    Truncates,
)


@dataclass(frozen=True)
class Case:
    """An example to try a law with."""

    rows: int
    pieces: tuple[int, ...]
    """Tokens of the calls, in order; their purpose depends on the law."""
    variant: str = ""
    """Which of a law's several actions is tried."""

    @property
    def tokens(self) -> int:
        return sum(self.pieces)

    def __str__(self) -> str:
        # Forty single tokens are summarised as one term.
        runs: list[tuple[int, int]] = []
        for piece in self.pieces:
            if runs and runs[-1][0] == piece:
                runs[-1] = (piece, runs[-1][1] + 1)
            elif piece:
                runs.append((piece, 1))
        pieces = " + ".join(f"{n} x {piece}" if n > 1 else str(piece) for piece, n in runs)
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
        return Named(self.value[index], f"{self.text}[{', '.join(map(_written, parts))}]")


def _written(index: Any) -> str:
    if isinstance(index, slice):
        start, stop = ("" if i is None else str(i) for i in (index.start, index.stop))
        return f"{start}:{stop}"
    return str(index)


def join(parts: Sequence[Named], dim: int = 1) -> Named:
    """``parts`` concatenated."""
    if len(parts) == 1:
        return parts[0]
    text = f"torch.cat([{', '.join(part.text for part in parts)}]"
    value = torch.cat([part.value for part in parts], dim)
    return Named(value, f"{text}, {dim})" if dim else f"{text})")


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
        generator = torch.Generator().manual_seed(seed)
        self.x = self._drawn("x", case.rows, generator)
        self.other = self._drawn("other", case.rows + 2, generator)

    def _drawn(self, name: str, rows: int, generator: torch.Generator) -> Named:
        inputs, shape = self.model.inputs, (rows, self.case.tokens)
        seed = int(torch.randint(2**31, (), generator=generator))
        value = inputs.draw(*shape, torch.Generator().manual_seed(seed))
        if inputs.width is None:
            # With few tokens, rows may begin alike, or end like those that they are compared with.
            for _ in range(20):
                same_start = rows > 1 and bool((value[0, 0] == value[:, 0]).all())
                last = self.x.value[:, -1].cpu() if name == "other" else None
                if not same_start and (
                    last is None or bool((value[: len(last), -1] != last).any())
                ):
                    break
                value = inputs.draw(*shape, generator)
            text = f"torch.tensor({value.tolist()})"
        else:
            text = f"torch.randn({rows}, {shape[1]}, {value.shape[2]}, "
            text += f"generator=torch.Generator().manual_seed({seed}), device='cpu')"
            text += f".to({value.dtype})" if value.dtype != torch.float32 else ""
        device = device_of(self.model)
        text += f".to({str(device)!r})" if device.type != "cpu" else ""
        self.lines.append(f"{name} = {text}")
        return Named(value.to(device), name)

    def line(self, text: str) -> None:
        self.lines.append(text)

    def given(self, value: Tensor, text: str, name: str) -> Named:
        """A computed value, under a new name."""
        self._count += 1
        self.line(f"{name}{self._count} = {text}")
        return Named(value, f"{name}{self._count}")

    def start(self, rows: int | None = None) -> Named:
        rows = self.case.rows if rows is None else rows
        return Named(self.model.start(rows), f"start({rows})")

    def read(self, inputs: Named, state: Named, own: bool = True) -> tuple[Named, Named]:
        """``own``: a copy of the inputs, which the call may spoil."""
        value = inputs.value.clone() if own else inputs.value
        text = f"read({inputs.text}, {state.text})"
        return self._outputs(self.model.read(value, state.value), text)

    def read_all(
        self, inputs: Named, pieces: Iterable[int], state: Named | None = None
    ) -> tuple[list[Named], Named]:
        """Read the first ``sum(pieces)`` of ``inputs``, a call for each of ``pieces`` that is not 0."""
        state = self.start(len(inputs.value)) if state is None else state
        outputs, at = [], 0
        tokens = inputs.value.shape[1]
        for piece in pieces:
            if piece:
                stop = at + piece
                part = inputs[:, at or None : stop if stop < tokens else None]
                output, state = self.read(part if piece < tokens else inputs, state)
                outputs.append(output)
                at = stop
        return outputs, state

    def read_padded(
        self, inputs: Named, state: Named, lengths: Tensor, side: Literal["right", "left"]
    ) -> tuple[Named, Named]:
        if not isinstance(self.model, ReadsPadded):
            raise NotOfferedError("it does not read padded inputs")
        text = (
            f"read_padded({inputs.text}, {state.text}, torch.tensor({lengths.tolist()}), {side!r})"
        )
        lengths = lengths.to(inputs.value.device)
        return self._outputs(self.model.read_padded(inputs.value, state.value, lengths, side), text)

    def read_packed(self, inputs: Named, state: Named, starts: Tensor) -> tuple[Named, Named]:
        if not isinstance(self.model, ReadsPacked):
            raise NotOfferedError("it does not read packed inputs")
        text = f"read_packed({inputs.text}, {state.text}, torch.tensor({starts.tolist()}))"
        starts = starts.to(inputs.value.device)
        return self._outputs(self.model.read_packed(inputs.value, state.value, starts), text)

    def _outputs(self, result: Any, text: str) -> tuple[Named, Named]:
        if not isinstance(result, tuple) or len(result) != 2:
            raise RefusedError(
                f"{text.partition('(')[0]} did not return a pair of outputs and state"
            )
        outputs, state = result
        if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
            kind = outputs.dtype if isinstance(outputs, Tensor) else type(outputs).__name__
            raise RefusedError(f"outputs are {kind}, not a tensor of a floating-point type")
        self._count += 1
        n = self._count
        self.line(f"y{n}, s{n} = {text}")
        return Named(outputs, f"y{n}"), Named(state, f"s{n}")

    def select(self, state: Named, rows: Sequence[int]) -> Named:
        index = torch.tensor(rows, device=self.x.value.device)
        text = f"select({state.text}, torch.tensor({list(rows)}))"
        return self._state(self.model.select(state.value, index), text)

    def copy(self, state: Named) -> Named:
        return self._state(self.model.copy(state.value), f"copy({state.text})")

    def reset(self, state: Named, rows: Sequence[bool]) -> Named:
        if not isinstance(self.model, Resets):
            raise NotOfferedError("its rows cannot be reset")
        mask = torch.tensor(rows, device=self.x.value.device)
        text = f"reset({state.text}, torch.tensor({list(rows)}))"
        return self._state(self.model.reset(state.value, mask), text)

    def truncate(self, state: Named, n: int) -> Named:
        if not isinstance(self.model, Truncates):
            raise NotOfferedError("it cannot be rolled back")
        return self._state(self.model.truncate(state.value, n), f"truncate({state.text}, {n})")

    def saved(self, state: Named) -> Named:
        """``state``, saved to a file and loaded from it."""
        if not isinstance(self.model, Saves):
            raise NotOfferedError("its states cannot be saved")
        path = self._folder / f"state{len(list(self._folder.iterdir()))}"
        self.model.save(state.value, path)
        self.line(f"save({state.text}, Path('state'))")
        return self._state(self.model.load(path), "load(Path('state'))")

    def _state(self, value: Any, text: str) -> Named:
        self._count += 1
        self.line(f"s{self._count} = {text}")
        return Named(value, f"s{self._count}")


def device_of(model: Stateful[Any]) -> torch.device:
    """The device of a model."""
    tensors = (*model.module.parameters(), *model.module.buffers())
    return tensors[0].device if tensors else torch.device("cpu")


_FUNCTIONS = (
    "module", "start", "read", "read_padded", "read_packed", "select", "copy", "reset", "truncate",
    "save", "load",
)  # fmt: skip


def script(model: Stateful[Any], lines: Sequence[str], shown: str, comment: str) -> str:
    """Python that runs ``lines`` as far as ``shown`` needs them, and prints that.

    It does not need memspan if the model :class:`~memspan.stateful.protocol.Reproduces`, or has lines
    ``made`` that make it; otherwise ``model`` must be defined, in evaluation mode.
    """
    names = _words(shown)
    last = max(
        (i for i, line in enumerate(lines) if names & _words(line.partition(" = ")[0])), default=0
    )
    lines = lines[: last + 1]
    # Calls may matter even if their results are not used; inputs that are not read do not.
    read = [_words("\n".join([*lines[:i], *lines[i + 1 :], shown])) for i in range(len(lines))]
    lines = [
        line
        for i, line in enumerate(lines)
        if _words(line.partition(" = ")[0]) & {"x", "other"} <= read[i]
    ]
    used = _words("\n".join([*lines, shown]))
    head = ["import torch"]
    if "Path" in used:
        head.append("from pathlib import Path")
    if isinstance(model, Reproduces):
        head.append(_without(model.source(), set(_FUNCTIONS) - used))
    else:
        head.append(getattr(model, "made", "# model: what was checked, in evaluation mode"))
        head.append("; ".join(f"{name} = model.{name}" for name in _FUNCTIONS if name in used))
    device = device_of(model)
    if device.type != "cpu":
        name = "module" if isinstance(model, Reproduces) else "model.module"
        head.append(f"{name}.to({str(device)!r}); torch.set_default_device({str(device)!r})")
    if "autograd" not in used:
        head.append("torch.set_grad_enabled(False)")
    return "\n".join([*head, *lines, f"print({shown})  # {comment}"]) + "\n"


def _without(source: str, names: set[str]) -> str:
    """``source`` without functions of these names."""
    lines = source.splitlines()
    for part in reversed(ast.parse(source).body):
        if isinstance(part, ast.FunctionDef) and part.name in names:
            del lines[part.lineno - 1 : part.end_lineno]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))
