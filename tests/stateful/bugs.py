"""Bugs planted in the twins: each is named by the law that it breaks.

One that every case notices which notices another of its law would show nothing that the other does not,
so a new one should be missed by some.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from small_models import BUGS as BUGS
from small_models import WIDTH, Attention, Convolved, Gated, State
from torch import Tensor, nn

from memspan.stateful.protocol import Claims

Side = Literal["right", "left"]
Read = tuple[Tensor, State]


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
    """What belongs to a row is spread over the tokens of a single one."""

    def read(self, inputs: Tensor, state: State) -> Read:
        y, state = super().read(inputs, state)
        return y if inputs.shape[1] > 1 else y.expand(-1, len(y), -1), state


class SelectIgnoresTheOrder(Gated, breaks="rows"):
    def select(self, state: State, rows: Tensor) -> State:
        return super().select(state, rows.sort().values)


class RepeatedRowsShareTheirState(Gated, breaks="rows"):
    """As after ``expand``: what one writes is the other's."""

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


class DetachedAtEveryToken(Gated):
    """Not named by a law: a long call has no other gradients."""

    def step(self, x: Tensor, h: Tensor, t: int) -> Tensor:
        return super().step(x, h.detach(), t)


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
