"""An architecture of your own in one file: a gated linear recurrence, whose state is its memory.

memspan train    --import own_architecture --model gated-recurrence --model.half-life 32 --out mine
memspan evaluate --import own_architecture mine
memspan generate --import own_architecture mine --prompt "The "
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memspan import Memory
from memspan.models import Backbone, BackboneConfig, BackboneOutput, register


@dataclass(frozen=True)
class GatedConfig(BackboneConfig):
    """A gated linear recurrence."""

    n_layers: int = 2
    """Number of layers."""
    d_model: int = 64
    """Width of the residual stream and of the state."""
    half_life: float = 16.0
    """Tokens after which half of the state is forgotten, before training."""

    def build(self) -> Gated:
        return Gated(self)


@dataclass(frozen=True, repr=False)
class GatedMemory(Memory):
    """The states after the last token."""

    state: Tensor
    """``[B, L, D]``."""


class GatedLayer(nn.Module):
    """``s_t = a_t * s_(t-1) + (1 - a_t) * v_t`` with ``a_t = sigmoid(W_a x_t + b)``; passes
    ``x_t + W_o s_t`` on, for ``x [B, T, D]`` and a ``state [B, D]``."""

    def __init__(self, d_model: int, half_life: float) -> None:
        super().__init__()
        self.inputs = nn.Linear(d_model, 2 * d_model)
        self.output = nn.Linear(d_model, d_model)
        a = 0.5 ** (1 / half_life)
        nn.init.constant_(self.inputs.bias[:d_model], math.log(a / (1 - a)))

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        gate, value = self.inputs(x).chunk(2, -1)
        states = []
        for a, v in zip(gate.sigmoid().unbind(1), value.unbind(1), strict=True):
            state = a * state + (1 - a) * v
            states.append(state)
        return x + self.output(torch.stack(states, 1)), state


class Gated(Backbone[GatedMemory]):
    """The stack."""

    memory_type = GatedMemory

    def __init__(self, config: GatedConfig) -> None:
        super().__init__(config)
        sizes = config.d_model, config.half_life
        self.layers = nn.ModuleList(GatedLayer(*sizes) for _ in range(config.n_layers))

    def row_sizes(self) -> dict[str, tuple[int, ...]]:
        """The sizes of one row's fields, of which empty memories are made."""
        return {"state": (len(self.layers), self.config.d_model)}

    def read_piece(
        self, x: Tensor, memory: GatedMemory, implementation: str | None
    ) -> BackboneOutput[GatedMemory]:
        """Read a segment of one document without padding; ``Backbone`` takes care of the rest."""
        states = []
        for layer, before in zip(self.layers, memory.state.unbind(1), strict=True):
            x, state = layer(x, before)
            states.append(state)
        memory = GatedMemory(memory.tokens_seen + x.shape[1], torch.stack(states, 1))
        return BackboneOutput(x, memory, x.new_zeros(()))


register("gated-recurrence", GatedConfig)
