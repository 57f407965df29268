"""More bugs planted in the twins: of what outlasts a call, in files, gradients, sizes and the model."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from bugs import BUGS, Read, breaks
from small_models import WIDTH, Attention, Convolved, Gated, Sliding, State
from torch import Tensor, nn

__all__ = ["BUGS"]

# Files.


@breaks("files")
class SaveDropsAField(Convolved):
    def load(self, path: Path) -> State:
        state = super().load(path)
        return state | {"window": torch.zeros_like(state["window"])}


@breaks("files")
class SavedInHalfPrecision(Gated):
    def save(self, state: State, path: Path) -> None:
        super().save({"h": state["h"].half()}, path)

    def load(self, path: Path) -> State:
        return {"h": super().load(path)["h"].to(self.dtype)}


# Gradients.


@breaks("gradients")
class StateDetachedAtACut(Gated):
    def mix(self, x: Tensor, state: State) -> Read:
        return super().mix(x, {"h": state["h"].detach()})


@breaks("gradients")
class DetachedInsideASegment(Gated):
    def step(self, x: Tensor, h: Tensor, t: int) -> Tensor:
        return super().step(x, h.detach() if t % 4 == 3 else h, t)


class DetachedAtEveryToken(Gated):
    """Not named by a law: a long call has no other gradients."""

    def step(self, x: Tensor, h: Tensor, t: int) -> Tensor:
        return super().step(x, h.detach(), t)


@breaks("gradients")
class WindowDetached(Convolved):
    def window(self, before: Tensor, x: Tensor) -> Tensor:
        return super().window(before, x).detach()


# Growth.


@breaks("bounded")
class KeepsEveryToken(Gated):
    def start(self, batch_size: int) -> State:
        return super().start(batch_size) | {"seen": torch.zeros(batch_size, 0, WIDTH)}

    def mix(self, x: Tensor, state: State) -> Read:
        y, after = super().mix(x, state)
        return y, after | {"seen": torch.cat([state["seen"], x], 1)}


@breaks("bounded")
class KeepsEverySingleToken(KeepsEveryToken):
    def mix(self, x: Tensor, state: State) -> Read:
        y, after = super().mix(x, state)
        return y, after if x.shape[1] == 1 else after | {"seen": state["seen"]}


@breaks("bounded")
class ClaimsAWindowAndKeepsAll(Sliding):
    def kept(self, state: State) -> State:
        return state


# Other calls.


@breaks("repeatable")
class DropoutLeftOn(Gated):
    def step(self, x: Tensor, h: Tensor, t: int) -> Tensor:
        return F.dropout(super().step(x, h, t), 0.01, training=True)


@breaks("repeatable")
class NoiseFromElsewhere(Gated):
    def step(self, x: Tensor, h: Tensor, t: int) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().step(x, h, t) + 1e-4 * (self.calls % 7)


@breaks("order-of-calls")
class StateOfTheModelItself(Gated):
    """A new stream goes on where the last one with as many rows was."""

    def step(self, x: Tensor, h: Tensor, t: int) -> Tensor:
        last = getattr(self, "last", None)
        if last is not None and len(last) == len(h) and not h.any():
            h = h + 1e-3 * last
        self.last = super().step(x, h, t).detach()
        return self.last


@breaks("order-of-calls")
class OneStreamAtATime(Gated):
    """The state is in the model, and that which is passed in only says whether it goes on."""

    def mix(self, x: Tensor, state: State) -> Read:
        rows = len(x)
        if not state["h"].any():
            self.h: dict[int, Tensor] = {**getattr(self, "h", {}), rows: state["h"]}
        y, after = super().mix(x, {"h": self.h.get(rows, state["h"])})
        self.h[rows] = after["h"]
        return y, after


@breaks("order-of-calls")
class PositionsScaledByTheLongestTextSoFar(Attention):
    def positions(self, state: State, real: Tensor) -> Tensor:
        position = super().positions(state, real)
        self.longest = max(getattr(self, "longest", 0), int(position.max()))
        return position / max(1, self.longest / 23)


@breaks("order-of-calls")
class RunningStatistics(Gated):
    def layers(self) -> dict[str, nn.Module]:
        return super().layers() | {"norm": nn.BatchNorm1d(WIDTH)}

    def mix(self, x: Tensor, state: State) -> Read:
        return super().mix(self.module["norm"](x.mT).mT, state)


@breaks("order-of-calls")
class AnotherPathWithGradients(Gated):
    def step(self, x: Tensor, h: Tensor, t: int) -> Tensor:
        return super().step(x, h, t) * (1.001 if torch.is_grad_enabled() else 1)
