"""Bugs planted in the twins: each is named by the law that it breaks."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from small_models import KERNEL, WIDTH, Attention, Convolved, Gated, Sliding, State, Twin
from torch import Tensor, nn

from memspan.stateful.protocol import Claims

BUGS: list[tuple[str, type[Twin]]] = []
Side = Literal["right", "left"]
Read = tuple[Tensor, State]


def breaks(law: str) -> Any:
    def register(kind: type[Twin]) -> type[Twin]:
        BUGS.append((law, kind))
        return kind

    return register


# What a call hands to the next.


@breaks("cuts")
class StateDroppedAtASecondSegmentOfManyTokens(Convolved):
    def carried(self, s: Tensor, x: Tensor) -> Tensor:
        return s if x.shape[1] == 1 else torch.zeros_like(s)


@breaks("cuts")
class WindowStaleAfterSingleTokens(Convolved):
    def window(self, before: Tensor, x: Tensor) -> Tensor:
        return before if x.shape[1] == 1 and before.any() else super().window(before, x)


@breaks("cuts")
class WindowForgetsWhatWasBeforeAShortSegment(Convolved):
    def window(self, before: Tensor, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, KERNEL - 1, 0))[:, -(KERNEL - 1) :]


@breaks("cuts")
class WindowOneTooOld(Convolved):
    def window(self, before: Tensor, x: Tensor) -> Tensor:
        return F.pad(torch.cat([before, x], 1)[:, -KERNEL:-1], (0, 0, 0, 0))


@breaks("cuts")
class StateInHalfPrecision(Gated):
    def mix(self, x: Tensor, state: State) -> Read:
        y, state = super().mix(x, state)
        return y, {"h": state["h"].to(torch.bfloat16).to(self.dtype)}


@breaks("cuts")
class PositionsResetAtACut(Attention):
    def positions(self, state: State, real: Tensor) -> Tensor:
        return real.cumsum(1) - 1


@breaks("cuts")
class PositionsOffByOneAfterACut(Attention):
    def positions(self, state: State, real: Tensor) -> Tensor:
        return super().positions(state, real) + (state["position"] > 0)[:, None]


@breaks("cuts")
class WindowOneTooShortInTheCache(Sliding):
    def kept(self, state: State) -> State:
        state = super().kept(state)
        return state | {name: state[name][:, 1:] for name in ("k", "v", "valid")}


@breaks("cuts")
class NormalisedOverTheSegmentSoFar(Gated):
    def read(self, inputs: Tensor, state: State) -> Read:
        y, state = super().read(inputs, state)
        return y / y.abs().mean(2, keepdim=True).cummax(1).values, state


@breaks("cuts")
class FirstSegmentOfOneTokenIsNotRemembered(Gated):
    def mix(self, x: Tensor, state: State) -> Read:
        y, after = super().mix(x, state)
        first = x.shape[1] == 1 and not state["h"].any()
        return y, state if first else after


# Later inputs.


@breaks("causality")
class MeanOverTheSegment(Convolved):
    def mix(self, x: Tensor, state: State) -> Read:
        return super().mix(x - 0.01 * x.mean(1, keepdim=True), state)


@breaks("causality")
class MaskLeaksAfterACache(Attention):
    def seen(self, queries: int, keys: int) -> Tensor:
        seen = super().seen(queries, keys)
        return seen | (keys > queries)


@breaks("causality")
class MaskLeaksOneToken(Attention):
    def seen(self, queries: int, keys: int) -> Tensor:
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries + 1)


# Rows.


@breaks("rows")
class StateSharedBetweenRows(Gated):
    def step(self, x: Tensor, h: Tensor, t: int) -> Tensor:
        return super().step(x, h + 1e-3 * h.mean(0), t)


@breaks("rows")
class TwiceTheOutputsForSeveralRows(Gated):
    """What belongs to a row is spread over the tokens of a single one."""

    def read(self, inputs: Tensor, state: State) -> Read:
        y, state = super().read(inputs, state)
        return y if inputs.shape[1] > 1 else y.expand(-1, len(y), -1), state


@breaks("rows")
class BatchStatistics(Gated):
    def layers(self) -> dict[str, nn.Module]:
        return super().layers() | {"norm": nn.BatchNorm1d(WIDTH, track_running_stats=False)}

    def mix(self, x: Tensor, state: State) -> Read:
        return super().mix(self.module["norm"](x.mT).mT if len(x) > 1 else x, state)


@breaks("rows")
class SelectForgetsAField(Convolved):
    def select(self, state: State, rows: Tensor) -> State:
        chosen = super().select(state, rows)
        window = state["window"][: len(rows)]
        return chosen | ({"window": window} if len(rows) <= len(state["s"]) else {})


@breaks("rows")
class SelectIgnoresTheOrder(Gated):
    def select(self, state: State, rows: Tensor) -> State:
        return super().select(state, rows.sort().values)


@breaks("rows")
class ARowAloneIsReadDifferently(Attention):
    def mix(self, x: Tensor, state: State) -> Read:
        return super().mix(x if len(x) > 1 else x * 1.001, state)


@breaks("rows")
class RepeatedRowsShareTheirState(Gated):
    """As after ``expand``: what one writes is the other's."""

    def select(self, state: State, rows: Tensor) -> State:
        self.repeated = len(rows.unique()) < len(rows)
        return super().select(state, rows)

    def step(self, x: Tensor, h: Tensor, t: int) -> Tensor:
        h = super().step(x, h, t)
        return h[:1].expand_as(h) if getattr(self, "repeated", False) else h


# States are values.


@breaks("values")
class StateChangedInPlace(Gated):
    def mix(self, x: Tensor, state: State) -> Read:
        y, after = super().mix(x, state)
        state["h"].copy_(after["h"].detach())
        return y, state


@breaks("values")
class WindowChangedInPlaceBySingleTokens(Convolved):
    def window(self, before: Tensor, x: Tensor) -> Tensor:
        after = super().window(before, x)
        return before.copy_(after.detach()) if x.shape[1] == 1 else after


@breaks("values")
class ShallowCopyOfWhatIsConsumed(StateChangedInPlace):
    claims = Claims(consumes_state=True)

    def copy(self, state: State) -> State:
        return dict(state)


@breaks("values")
class OutputsInABufferOfTheModel(Gated):
    def read(self, inputs: Tensor, state: State) -> Read:
        y, state = super().read(inputs, state)
        buffers = self.__dict__.setdefault("buffers", {})
        buffer = buffers.setdefault(y.shape[0], y.detach().new_zeros(y.shape[0], 999, y.shape[2]))
        buffer[:, : y.shape[1]] = y.detach()
        return buffer[:, : y.shape[1]], state


@breaks("values")
class InputsChangedInPlace(Gated):
    def __init__(self, dtype: torch.dtype = torch.float32, vectors: bool = True) -> None:
        super().__init__(dtype, vectors=True)

    def read(self, inputs: Tensor, state: State) -> Read:
        result = super().read(inputs, state)
        inputs *= 0.5
        return result


# Beginning anew.


@breaks("fresh-start")
class ResetOfTheWrongRow(Gated):
    def reset(self, state: State, rows: Tensor) -> State:
        return super().reset(state, rows.roll(1))


@breaks("fresh-start")
class ResetForgetsAField(Convolved):
    def reset(self, state: State, rows: Tensor) -> State:
        return super().reset(state, rows) | {"window": state["window"]}


@breaks("fresh-start")
class ResetOfAllRows(Gated):
    def reset(self, state: State, rows: Tensor) -> State:
        return self.start(len(rows)) if rows.any() else state


@breaks("fresh-start")
class PositionsGoOnAfterAReset(Attention):
    """Rotations are relative, so an absolute position is added."""

    def reset(self, state: State, rows: Tensor) -> State:
        return super().reset(state, rows) | {"position": state["position"]}

    def attend(self, x: Tensor, state: State, real: Tensor) -> Read:
        return super().attend(x + self.positions(state, real)[..., None].to(x) / 50, state, real)


@breaks("fresh-start")
class DocumentsOnlyAtTheFirstPlace(Gated):
    def read_packed(self, inputs: Tensor, state: State, starts: Tensor) -> Read:
        return self.read(inputs, self.reset(state, starts[:, 0]))


@breaks("fresh-start")
class AFirstPlaceIsNeverAStart(Convolved):
    def read_packed(self, inputs: Tensor, state: State, starts: Tensor) -> Read:
        return super().read_packed(inputs, state, F.pad(starts[:, 1:], (1, 0)))


# Padding.


class PaddingIsRead(Twin):
    side: Side
    rows: float = math.inf
    """With so many rows at most."""

    def read_padded(self, inputs: Tensor, state: State, lengths: Tensor, side: Side) -> Read:
        if side == self.side and len(inputs) <= self.rows:
            return self.read(inputs, state)
        return super().read_padded(inputs, state, lengths, side)


@breaks("padding-right")
class PaddingOnTheRightIsRead(PaddingIsRead, Gated):
    side = "right"


@breaks("padding-right")
class WindowTakenFromThePadding(Convolved):
    def read_padded(self, inputs: Tensor, state: State, lengths: Tensor, side: Side) -> Read:
        y, after = super().read_padded(inputs, state, lengths, side)
        return y, after | {"window": self.read(inputs, state)[1]["window"]}


@breaks("padding-right")
class PaddingOnTheRightCountsAsPositions(Attention):
    def attend(self, x: Tensor, state: State, real: Tensor) -> Read:
        y, after = super().attend(x, state, real)
        return y, after | {"position": state["position"] + x.shape[1]}


@breaks("padding-left")
class PaddingOnTheLeftIsRead(PaddingIsRead, Convolved):
    side = "left"


@breaks("padding-left")
class PaddingOfASingleRowIsRead(PaddingIsRead, Convolved):
    side = "left"
    rows = 1


@breaks("padding-left")
class PaddingOnTheLeftCountsInALaterSegment(Attention):
    def positions(self, state: State, real: Tensor) -> Tensor:
        later = (state["position"] > 0)[:, None]
        count = torch.where(later, torch.ones_like(real).cumsum(1), real.cumsum(1))
        return state["position"][:, None] + count - 1


# Rolling back.


@breaks("roll-back")
class RolledBackByOneTooFew(Attention):
    def truncate(self, state: State, n: int) -> State:
        return super().truncate(state, n - 1)


@breaks("roll-back")
class RolledBackButForThePosition(Attention):
    def truncate(self, state: State, n: int) -> State:
        return super().truncate(state, n) | {"position": state["position"]}


@breaks("roll-back")
class RollsBackByOneAtMost(Attention):
    def truncate(self, state: State, n: int) -> State:
        return super().truncate(state, min(n, 1))
