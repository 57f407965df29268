"""Small correct models with state, and bugs planted in them: each is named by the law that it breaks.

One that every case notices which notices another of its law would show nothing that the other does not,
so a new one should be missed by some.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statelaws import Claims, Inputs, RefusedError

WIDTH = 8
VOCABULARY = 11
KERNEL = 4
WINDOW = 6

State = dict[str, Tensor]
Read = tuple[Tensor, State]
Side = Literal["right", "left"]
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

    def read(self, inputs: Tensor, state: State) -> Read:
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

    def read_padded(self, inputs: Tensor, state: State, lengths: Tensor, side: Side) -> Read:
        outputs = []
        for t in range(inputs.shape[1]):
            real = t < lengths if side == "right" else t >= inputs.shape[1] - lengths
            y, after = self.read(inputs[:, t : t + 1], state)
            state = {name: where(real, after[name], state[name]) for name in state}
            outputs.append(y)
        return torch.cat(outputs, 1), state

    def read_packed(self, inputs: Tensor, state: State, starts: Tensor) -> Read:
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

    def mix(self, x: Tensor, state: State) -> Read:
        h = state["h"]
        outputs = []
        for t in range(x.shape[1]):
            h = self.step(x[:, t], h, t)
            outputs.append(h)
        return torch.stack(outputs, 1), {"h": h}

    def step(self, x: Tensor, h: Tensor, t: int) -> Tensor:
        return self.module["cell"](x, h)

    def read_varlen(self, inputs: Tensor, state: State, cu_seqlens: Tensor) -> Read:
        """Row by row."""
        edges = cu_seqlens.tolist()
        outputs = []
        after = []
        for row in range(len(edges) - 1):
            part = inputs[:, edges[row] : edges[row + 1]]
            y, own = self.read(part, self.select(state, torch.tensor([row])))
            outputs.append(y)
            after.append(own["h"])
        return torch.cat(outputs, 1), {"h": torch.cat(after)}

    def replay(self, inputs: Tensor, state: State, starts: Tensor) -> Tensor:
        return self.read_packed(inputs, state, starts)[0]


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

    def mix(self, x: Tensor, state: State) -> Read:
        joined = torch.cat([state["window"], x], 1)
        u = F.silu(self.module["convolution"](joined.mT).mT)
        decay = self.module["decay"](u).sigmoid()
        write = self.module["write"](u)
        s = self.carried(state["s"], x)
        outputs = []
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

    def mix(self, x: Tensor, state: State) -> Read:
        return self.attend(x, state, torch.ones(x.shape[:2], dtype=torch.bool))

    def attend(self, x: Tensor, state: State, real: Tensor) -> Read:
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

    def read_padded(self, inputs: Tensor, state: State, lengths: Tensor, side: Side) -> Read:
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


# ----- Bugs


class StateDroppedAtASecondSegmentOfManyTokens(Convolved, breaks="cuts"):
    def carried(self, s: Tensor, x: Tensor) -> Tensor:
        return s if x.shape[1] == 1 else torch.zeros_like(s)


class WindowStaleAfterSingleTokens(Convolved, breaks="cuts"):
    def window(self, before: Tensor, x: Tensor) -> Tensor:
        return before if x.shape[1] == 1 and before.any() else super().window(before, x)


class PositionsResetAtACut(Attention, breaks="cuts"):
    def positions(self, state: State, real: Tensor) -> Tensor:
        return real.cumsum(1) - 1


class MaskLeaksAfterACache(Attention, breaks="causality"):
    def seen(self, queries: int, keys: int) -> Tensor:
        seen = super().seen(queries, keys)
        return seen | (keys > queries)


class TwiceTheOutputsForSeveralRows(Gated, breaks="rows"):
    """It spreads a row's outputs over the tokens of a single row."""

    def read(self, inputs: Tensor, state: State) -> Read:
        y, state = super().read(inputs, state)
        return y if inputs.shape[1] > 1 else y.expand(-1, len(y), -1), state


class SelectIgnoresTheOrder(Gated, breaks="rows"):
    def select(self, state: State, rows: Tensor) -> State:
        return super().select(state, rows.sort().values)


class RepeatedRowsShareTheirState(Gated, breaks="rows"):
    """Rows share memory as after ``expand``: one row's writes are the other's."""

    def select(self, state: State, rows: Tensor) -> State:
        self.repeated = len(rows.unique()) < len(rows)
        return super().select(state, rows)

    def step(self, x: Tensor, h: Tensor, t: int) -> Tensor:
        h = super().step(x, h, t)
        return h[:1].expand_as(h) if getattr(self, "repeated", False) else h


class WindowChangedInPlaceBySingleTokens(Convolved, breaks="values"):
    def window(self, before: Tensor, x: Tensor) -> Tensor:
        after = super().window(before, x)
        return before.copy_(after.detach()) if x.shape[1] == 1 else after


class ShallowCopyOfWhatIsConsumed(WindowChangedInPlaceBySingleTokens, breaks="values"):
    claims = Claims(consumes_state=True, lengths=Convolved.claims.lengths)

    def copy(self, state: State) -> State:
        return dict(state)


class OutputsInABufferOfTheModel(Gated, breaks="values"):
    def read(self, inputs: Tensor, state: State) -> Read:
        y, state = super().read(inputs, state)
        buffers = self.__dict__.setdefault("buffers", {})
        buffer = buffers.setdefault(y.shape[0], y.detach().new_zeros(y.shape[0], 999, y.shape[2]))
        buffer[:, : y.shape[1]] = y.detach()
        return buffer[:, : y.shape[1]], state


class InputsChangedInPlace(Gated, breaks="values"):
    def __init__(self, dtype: torch.dtype = torch.float32, vectors: bool = True) -> None:
        super().__init__(dtype, vectors=True)

    def read(self, inputs: Tensor, state: State) -> Read:
        result = super().read(inputs, state)
        inputs *= 0.5
        return result


class ResetForgetsAField(Convolved, breaks="fresh-start"):
    def reset(self, state: State, rows: Tensor) -> State:
        return super().reset(state, rows) | {"window": state["window"]}


class DocumentsOnlyAtTheFirstPlace(Gated, breaks="fresh-start"):
    def read_packed(self, inputs: Tensor, state: State, starts: Tensor) -> Read:
        return self.read(inputs, self.reset(state, starts[:, 0]))


class WindowTakenFromThePadding(Convolved, breaks="padding-right"):
    def read_padded(self, inputs: Tensor, state: State, lengths: Tensor, side: Side) -> Read:
        y, after = super().read_padded(inputs, state, lengths, side)
        return y, after | {"window": self.read(inputs, state)[1]["window"]}


class PaddingOnTheLeftCountsInALaterSegment(Attention, breaks="padding-left"):
    def positions(self, state: State, real: Tensor) -> Tensor:
        later = (state["position"] > 0)[:, None]
        count = torch.where(later, torch.ones_like(real).cumsum(1), real.cumsum(1))
        return state["position"][:, None] + count - 1


class RollsBackByOneAtMost(Attention, breaks="roll-back"):
    def truncate(self, state: State, n: int) -> State:
        return super().truncate(state, min(n, 1))


class SavedInHalfPrecision(Gated, breaks="files"):
    def save(self, state: State, path: Path) -> None:
        super().save({"h": state["h"].half()}, path)

    def load(self, path: Path) -> State:
        return {"h": super().load(path)["h"].to(self.dtype)}


class StateDetachedAtACut(Gated, breaks="gradients"):
    def mix(self, x: Tensor, state: State) -> Read:
        return super().mix(x, {"h": state["h"].detach()})


class KeepsEverySingleToken(Gated, breaks="bounded"):
    def start(self, batch_size: int) -> State:
        return super().start(batch_size) | {"seen": torch.zeros(batch_size, 0, WIDTH)}

    def mix(self, x: Tensor, state: State) -> Read:
        y, after = super().mix(x, state)
        new = x if x.shape[1] == 1 else x[:, :0]
        return y, after | {"seen": torch.cat([state["seen"], new], 1)}


class NoiseFromElsewhere(Gated, breaks="repeatable"):
    def step(self, x: Tensor, h: Tensor, t: int) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().step(x, h, t) + 1e-4 * (self.calls % 7)


class PositionsScaledByTheLongestTextSoFar(Attention, breaks="order-of-calls"):
    def positions(self, state: State, real: Tensor) -> Tensor:
        position = super().positions(state, real)
        self.longest = max(getattr(self, "longest", 0), int(position.max()))
        return position / max(1, self.longest / 23)


class RunningStatistics(Gated, breaks="order-of-calls"):
    def layers(self) -> dict[str, nn.Module]:
        return super().layers() | {"norm": nn.BatchNorm1d(WIDTH)}

    def mix(self, x: Tensor, state: State) -> Read:
        return super().mix(self.module["norm"](x.mT).mT, state)


class AnotherPathWithGradients(Gated, breaks="order-of-calls"):
    def step(self, x: Tensor, h: Tensor, t: int) -> Tensor:
        return super().step(x, h, t) * (1.001 if torch.is_grad_enabled() else 1)


# ----- Bugs at their edges: few cases notice them


class StaleKeysAfterARollBack(Attention, breaks="roll-back"):
    """Rolling back moves a pointer, and one token too much of what is behind it is seen."""

    def truncate(self, state: State, n: int) -> State:
        return super().truncate(state, n) | {"stale_k": state["k"], "stale_v": state["v"]}

    def copy(self, state: State) -> State:
        return {name: value.clone() for name, value in state.items()}

    def attend(self, x: Tensor, state: State, real: Tensor) -> Read:
        state = dict(state)
        k = state.pop("stale_k", None)
        v = state.pop("stale_v", None)
        n = state["k"].shape[1]
        if k is None or k.shape[1] <= n + x.shape[1]:
            return super().attend(x, state, real)
        y, after = super().attend(x, state, real)
        q = turned(self.module["query"](x), self.positions(state, real))
        late = slice(n + x.shape[1], None)
        shares = (q @ k[:, late].mT).sigmoid()
        return y + shares @ v[:, late], after


class UnsortedWithTheOrder(Gated, breaks="padding-right"):
    """Sorted from the longest row to the shortest, and put back by the order, not by its inverse."""

    claims = Claims(padding=frozenset({"right"}))

    def read_padded(self, inputs: Tensor, state: State, lengths: Tensor, side: Side) -> Read:
        order = lengths.argsort(descending=True)
        y, after = super().read_padded(
            inputs[order], self.select(state, order), lengths[order], side
        )
        return y[order], self.select(after, order)


class WrongAboveEightRows(Gated, breaks="rows"):
    def step(self, x: Tensor, h: Tensor, t: int) -> Tensor:
        h = super().step(x, h, t)
        return h if len(h) <= 8 else h.roll(1, 0)


class BeginningOfATextResetsAllRows(Gated, breaks="rows"):
    """Token 1 begins a text, in every row."""

    def __init__(self, dtype: torch.dtype = torch.float32, vectors: bool = False) -> None:
        super().__init__(dtype, vectors)
        self.module["embedding"] = nn.Embedding(5000, WIDTH)
        self.inputs = Inputs(vocab_size=5000)

    def read(self, inputs: Tensor, state: State) -> Read:
        begins = (inputs == 1).any()
        return super().read(inputs, {"h": 0 * state["h"]} if begins else state)


class NothingReadIsAStart(Gated, breaks="cuts"):
    def mix(self, x: Tensor, state: State) -> Read:
        if not x.shape[1]:
            return x, self.start(len(x))
        return super().mix(x, state)


class StateIsAViewOfInputs(Twin, breaks="values"):
    """The last three inputs, which it does not copy."""

    def __init__(self, dtype: torch.dtype = torch.float32, vectors: bool = True) -> None:
        super().__init__(dtype, vectors=True)

    def layers(self) -> dict[str, nn.Module]:
        return {"convolution": nn.Conv1d(WIDTH, WIDTH, KERNEL)}

    def start(self, batch_size: int) -> State:
        return {"window": torch.zeros(batch_size, KERNEL - 1, WIDTH)}

    def mix(self, x: Tensor, state: State) -> Read:
        joined = torch.cat([state["window"], x], 1)
        enough = x if x.shape[1] >= KERNEL - 1 else joined
        y = self.module["convolution"](joined.mT).mT
        return y, {"window": enough[:, -(KERNEL - 1) :]}


class Slots:
    __slots__ = ("h", "tokens")

    def __init__(self, h: Tensor, tokens: Tensor) -> None:
        self.h = h
        self.tokens = tokens


class GrowsInSlots(Gated, breaks="bounded"):
    def start(self, batch_size: int) -> Any:
        h = super().start(batch_size)["h"]
        return Slots(h, h[:, None])

    def read(self, inputs: Tensor, state: Any) -> Any:
        y, after = super().read(inputs, {"h": state.h})
        return y, Slots(after["h"], torch.cat([state.tokens, y[..., :WIDTH]], 1))


class ViewOfAGrowingStorage(Gated, breaks="bounded"):
    def mix(self, x: Tensor, state: State) -> Read:
        y, after = super().mix(x, state)
        before = state["h"].untyped_storage().nbytes() // y.element_size()
        every = torch.cat([torch.zeros(before), after["h"].flatten()])
        return y, {"h": every[before:].view_as(after["h"])}


class TheModelKeepsItsOutputs(Gated, breaks="bounded"):
    def read(self, inputs: Tensor, state: State) -> Read:
        y, state = super().read(inputs, state)
        self.module.__dict__.setdefault("seen", []).append(y.detach())
        return y, state


class OtherFrequenciesInLongCalls(Attention, breaks="cuts"):
    def positions(self, state: State, real: Tensor) -> Tensor:
        position = super().positions(state, real)
        return position / 2 if position.max() >= 64 else position


class WrongAboveAChunkOf64(Gated, breaks="cuts"):
    def step(self, x: Tensor, h: Tensor, t: int) -> Tensor:
        return super().step(x, torch.zeros_like(h) if t == 64 else h, t)


class PositionsOfEightBitsInSingleSteps(Attention, breaks="cuts"):
    def positions(self, state: State, real: Tensor) -> Tensor:
        position = super().positions(state, real)
        return position.to(torch.int8).long() if real.shape[1] == 1 else position


class HalvedInBfloat16(Gated, breaks="cuts"):
    """Before single tokens."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, vectors: bool = False) -> None:
        super().__init__(dtype, vectors)

    def mix(self, x: Tensor, state: State) -> Read:
        halved = x.dtype == torch.bfloat16 and x.shape[1] == 1
        return super().mix(x, {"h": state["h"] / 2} if halved else state)


class FirstCallsAreOthers(Gated, breaks="order-of-calls"):
    """It remembers that it was called, which by the time of most laws it has been."""

    first = 5

    def step(self, x: Tensor, h: Tensor, t: int) -> Tensor:
        calls = self.__dict__.setdefault("calls", [])
        if t == 0:
            calls.append(1)
        return super().step(x, h, t) * (1.0 if len(calls) <= self.first else 0.9)


class FrozenAfterCalibration(FirstCallsAreOthers, breaks="order-of-calls"):
    first = 60


class LockedDropoutLeaks(Gated, breaks="order-of-calls"):
    """A mask that training draws is used by evaluation, for as many rows."""

    def mix(self, x: Tensor, state: State) -> Read:
        y, after = super().mix(x, state)
        masks = self.module.__dict__.setdefault("masks", {})
        if self.module.training:
            masks[len(x)] = (torch.rand(len(x), 1, WIDTH) > 0.2).to(y)
        return y * masks.get(len(x), 1.0), after


# ----- Policies and their windows, rows laid end to end, long texts


class WindowsReplayedFromAnEmptyState(Gated, breaks="replay"):
    def replay(self, inputs: Tensor, state: State, starts: Tensor) -> Tensor:
        return super().replay(inputs, self.start(len(inputs)), starts)


class EpisodesGoOnInReplay(Gated, breaks="replay"):
    """The first step after an episode's end still sees its state, as its end is seen a step late."""

    def replay(self, inputs: Tensor, state: State, starts: Tensor) -> Tensor:
        late = torch.cat([torch.zeros_like(starts[:, :1]), starts[:, :-1]], 1)
        return super().replay(inputs, state, late)


class StoredStatesReshaped(Twin, breaks="replay"):
    """Two layers: their states are stored rows first, and reshaped where axes have to be swapped."""

    def layers(self) -> dict[str, nn.Module]:
        return {"cells": nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)}

    def start(self, batch_size: int) -> State:
        return {"h": torch.zeros(batch_size, 2, WIDTH)}

    def mix(self, x: Tensor, state: State) -> Read:
        y, h = self.module["cells"](x, state["h"].transpose(0, 1).contiguous())
        return y, {"h": h.transpose(0, 1)}

    def replay(self, inputs: Tensor, state: State, starts: Tensor) -> Tensor:
        h = state["h"].reshape(2, -1, WIDTH).transpose(0, 1)
        return self.read_packed(inputs, {"h": h}, starts)[0]


class RowsLaidEndToEndReadOn(Gated, breaks="fresh-start"):
    """Every row goes on from the one before it."""

    def read_varlen(self, inputs: Tensor, state: State, cu_seqlens: Tensor) -> Read:
        _, after = super().read_varlen(inputs, state, cu_seqlens)
        return self.read(inputs, self.select(state, torch.tensor([0])))[0], after


class Counting(Twin):
    """It counts its tokens."""

    dtype_of_count = torch.int64

    def layers(self) -> dict[str, nn.Module]:
        return {"cells": nn.GRU(WIDTH, WIDTH, batch_first=True)}

    def start(self, batch_size: int) -> State:
        count = torch.zeros(batch_size, dtype=self.dtype_of_count)
        return {"h": torch.zeros(batch_size, WIDTH), "count": count}

    def mix(self, x: Tensor, state: State) -> Read:
        y, h = self.module["cells"](x, state["h"][None])
        count = (state["count"] + x.shape[1]).to(self.dtype_of_count)
        return self.counted(y, x.shape[1], count), {"h": h[0], "count": count}

    def counted(self, y: Tensor, n: int, count: Tensor) -> Tensor:
        return y


class SingleStepsAreOthersFrom600On(Counting, breaks="long-run"):
    def counted(self, y: Tensor, n: int, count: Tensor) -> Tensor:
        return y * 0.9 if n == 1 and int(count[0]) > 600 else y


class CountsInSixteenBits(Counting, breaks="long-run"):
    dtype_of_count = torch.int16
