"""Small correct models with state, to plant bugs in."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memspan.stateful.protocol import Claims, Inputs, RefusedError

WIDTH, VOCABULARY, KERNEL, WINDOW = 8, 11, 4, 6

State = dict[str, Tensor]


BUGS: list[tuple[str, type[Twin]]] = []
"""Twins with a bug, each after the law that it breaks."""


class Twin:
    """A subclass has ``layers``, ``start`` and ``mix``, and perhaps a law that it ``breaks``.

    A state is a dictionary of tensors, batch first. Padding and documents go token by token.
    """

    claims = Claims(padding=frozenset({"right", "left", "left-continued"}))

    def __init_subclass__(cls, breaks: str | None = None) -> None:
        if breaks is not None:
            BUGS.append((breaks, cls))

    def __init__(self, dtype: torch.dtype = torch.float32, vectors: bool = False) -> None:
        torch.manual_seed(0)
        embedding = nn.Identity() if vectors else nn.Embedding(VOCABULARY, WIDTH)
        self.module = nn.ModuleDict({"embedding": embedding, **self.layers()})
        self.module["head"] = nn.Linear(WIDTH, VOCABULARY)
        self.module.to(dtype)
        self.dtype = dtype
        self.inputs = Inputs(width=WIDTH, dtype=dtype) if vectors else Inputs(vocab_size=VOCABULARY)

    def read(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        y, state = self.mix(self.module["embedding"](inputs), state)
        return self.module["head"](y), state

    def select(self, state: State, rows: Tensor) -> State:
        return {name: value[rows] for name, value in state.items()}

    def copy(self, state: State) -> State:
        return {name: value.clone() for name, value in state.items()}

    def reset(self, state: State, rows: Tensor) -> State:
        return {name: where(rows, torch.zeros_like(v), v) for name, v in state.items()}

    def save(self, state: State, path: Path) -> None:
        torch.save(state, path)

    def load(self, path: Path) -> State:
        return torch.load(path)

    def read_padded(
        self, inputs: Tensor, state: State, lengths: Tensor, side: Literal["right", "left"]
    ) -> tuple[Tensor, State]:
        outputs = []
        for t in range(inputs.shape[1]):
            real = t < lengths if side == "right" else t >= inputs.shape[1] - lengths
            y, after = self.read(inputs[:, t : t + 1], state)
            state = {name: where(real, after[name], state[name]) for name in state}
            outputs.append(y)
        return torch.cat(outputs, 1), state

    def read_packed(self, inputs: Tensor, state: State, starts: Tensor) -> tuple[Tensor, State]:
        outputs = []
        for t in range(inputs.shape[1]):
            y, state = self.read(inputs[:, t : t + 1], self.reset(state, starts[:, t]))
            outputs.append(y)
        return torch.cat(outputs, 1), state


def where(rows: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(rows.view(-1, *[1] * (no.dim() - 1)), yes, no)


class Gated(Twin):
    """A recurrent cell."""

    def layers(self) -> dict[str, nn.Module]:
        return {"cell": nn.GRUCell(WIDTH, WIDTH)}

    def start(self, batch_size: int) -> State:
        return {"h": torch.zeros(batch_size, WIDTH, dtype=self.dtype)}

    def mix(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        h, outputs = state["h"], []
        for t in range(x.shape[1]):
            h = self.step(x[:, t], h, t)
            outputs.append(h)
        return torch.stack(outputs, 1), {"h": h}

    def step(self, x: Tensor, h: Tensor, t: int) -> Tensor:
        return self.module["cell"](x, h)


class Convolved(Twin):
    """A causal convolution, then a linear recurrence."""

    claims = Claims(padding=Twin.claims.padding, lengths={"convolution": KERNEL})

    def layers(self) -> dict[str, nn.Module]:
        return {
            "convolution": nn.Conv1d(WIDTH, WIDTH, KERNEL),
            "decay": nn.Linear(WIDTH, WIDTH),
            "write": nn.Linear(WIDTH, WIDTH),
        }

    def start(self, batch_size: int) -> State:
        window = torch.zeros(batch_size, KERNEL - 1, WIDTH, dtype=self.dtype)
        return {"window": window, "s": window[:, 0].clone()}

    def mix(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        joined = torch.cat([state["window"], x], 1)
        u = F.silu(self.module["convolution"](joined.mT).mT)
        decay, write = self.module["decay"](u).sigmoid(), self.module["write"](u)
        s, outputs = self.carried(state["s"], x), []
        for t in range(x.shape[1]):
            s = decay[:, t] * s + write[:, t]
            outputs.append(s)
        return torch.stack(outputs, 1), {"window": self.window(state["window"], x), "s": s}

    def carried(self, s: Tensor, x: Tensor) -> Tensor:
        return s

    def window(self, before: Tensor, x: Tensor) -> Tensor:
        return torch.cat([before, x], 1)[:, -(KERNEL - 1) :]


class Attention(Twin):
    """All keys and values are kept, each turned by its position."""

    claims = Claims(bounded=False, padding=Twin.claims.padding)

    def layers(self) -> dict[str, nn.Module]:
        return {name: nn.Linear(WIDTH, WIDTH) for name in ("query", "key", "value", "out")}

    def start(self, batch_size: int) -> State:
        empty = torch.zeros(batch_size, 0, WIDTH, dtype=self.dtype)
        none = torch.zeros(batch_size, dtype=torch.long)
        return {"k": empty, "v": empty, "valid": empty[..., 0].bool(), "position": none}

    def reset(self, state: State, rows: Tensor) -> State:
        names = ("valid", "position")
        return state | {n: where(rows, torch.zeros_like(state[n]), state[n]) for n in names}

    def truncate(self, state: State, n: int) -> State:
        names = ("k", "v", "valid")
        if n > state["k"].shape[1]:
            raise RefusedError("the cache has no more so many tokens")
        kept = {name: state[name][:, : state[name].shape[1] - n] for name in names}
        return kept | {"position": state["position"] - n}

    def mix(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return self.attend(x, state, torch.ones(x.shape[:2], dtype=torch.bool))

    def attend(self, x: Tensor, state: State, real: Tensor) -> tuple[Tensor, State]:
        position = self.positions(state, real)
        k = torch.cat([state["k"], turned(self.module["key"](x), position)], 1)
        v = torch.cat([state["v"], self.module["value"](x)], 1)
        valid = torch.cat([state["valid"], real], 1)
        q = turned(self.module["query"](x), position)
        scores = 4 * q @ k.mT / math.sqrt(WIDTH)
        seen = self.seen(x.shape[1], k.shape[1]) & valid[:, None]
        scores = scores.masked_fill(~seen, -1e4)
        y = self.module["out"](scores.softmax(-1) @ v) + x
        after = {"k": k, "v": v, "valid": valid, "position": state["position"] + real.sum(1)}
        return y, self.kept(after)

    def positions(self, state: State, real: Tensor) -> Tensor:
        return state["position"][:, None] + real.cumsum(1) - 1

    def seen(self, queries: int, keys: int) -> Tensor:
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)

    def kept(self, state: State) -> State:
        return state

    def read_padded(
        self, inputs: Tensor, state: State, lengths: Tensor, side: Literal["right", "left"]
    ) -> tuple[Tensor, State]:
        t = torch.arange(inputs.shape[1])
        n = lengths[:, None]
        real = t < n if side == "right" else t >= inputs.shape[1] - n
        y, state = self.attend(self.module["embedding"](inputs), state, real)
        return self.module["head"](y), state


class Sliding(Attention):
    """Keys and values of a window are kept."""

    claims = Claims(lengths={"window": WINDOW})
    read_padded: Any = None

    def seen(self, queries: int, keys: int) -> Tensor:
        return super().seen(queries, keys).triu(keys - queries - WINDOW + 1)

    def kept(self, state: State) -> State:
        names = ("k", "v", "valid")
        return state | {name: state[name][:, -(WINDOW - 1) :] for name in names}

    def truncate(self, state: State, n: int) -> State:
        raise RefusedError("what has left the window is gone")


def turned(x: Tensor, position: Tensor) -> Tensor:
    angle = position[..., None] * torch.tensor([1.0, 0.3, 0.1, 0.03], dtype=x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
