"""An architecture of your own in one file: a gated linear recurrence, whose state is its memory.

    memspan train    --import own_architecture --model gated-recurrence --model.half-life 32 --out mine
    memspan evaluate --import own_architecture mine --carried-share 0.5
    memspan generate --import own_architecture mine --prompt "The "

Each layer computes ``s_t = a_t * s_(t-1) + (1 - a_t) * v_t`` with ``a_t = sigmoid(W_a x_t + b)``, and
passes ``x_t + W_o s_t`` on. An installed package needs no ``--import``: it names the module in the
entry point group ``memspan.architectures``.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from memspan import Memory
from memspan.models import (
    Backbone,
    BackboneConfig,
    BackboneOutput,
    BackboneReader,
    Plot,
    read_in_pieces,
    register,
)


@dataclass(frozen=True)
class CarriedShare:
    """The options that evaluation may change."""

    carried_share: float | None = None
    """Part of the state that is carried from token to token, 0 to 1 (None: as in training)."""


@dataclass(frozen=True)
class GatedConfig(BackboneConfig):
    """A gated linear recurrence."""

    n_layers: int = 2
    """Number of layers."""
    d_model: int = 64
    """Width of the residual stream and of the state."""
    half_life: float = 16.0
    """Tokens after which half of the state is forgotten, before training."""
    carried_share: float = 1.0
    """Part of the state that is carried from token to token, besides the gate."""
    initialisation: Literal["scaled", "papers"] = "scaled"
    """How the embedding is initialised."""

    reader_options: ClassVar[type] = CarriedShare
    plots: ClassVar[tuple[Plot, ...]] = (
        Plot("gates.png", "mean gate", {"mean over layers": "gate"}),
    )

    def build(self) -> Gated:
        """The backbone."""
        return Gated(self)

    def least_parameters(self) -> int:
        """The numbers in all matrices."""
        return 3 * self.n_layers * self.d_model**2


@dataclass(frozen=True, repr=False)
class GatedMemory(Memory):
    """The states after the last token."""

    state: Tensor
    """``[B, L, D]``."""


class Gated(Backbone[GatedMemory]):
    """The stack. It has no reader of its own; results do not depend on where a text is cut."""

    memory_type = GatedMemory
    config: GatedConfig

    def __init__(self, config: GatedConfig) -> None:
        super().__init__(config)
        d = config.d_model
        self.layers = nn.ModuleList(nn.Linear(d, 2 * d) for _ in range(config.n_layers))
        self.outputs = nn.ModuleList(nn.Linear(d, d) for _ in range(config.n_layers))
        a = 0.5 ** (1 / config.half_life)
        for layer in self.layers:
            nn.init.constant_(layer.bias[:d], math.log(a / (1 - a)))

    def units(self) -> list[nn.Module]:
        """Every linear layer is used in its own forward pass only."""
        return [*self.layers, *self.outputs]

    def row_sizes(self) -> dict[str, tuple[int, ...]]:
        """The sizes of one row's fields, of which empty memories are made."""
        return {"state": (self.config.n_layers, self.config.d_model)}

    def reader(
        self, memory: GatedMemory | None, batch_size: int, *, carried_share: float | None = None
    ) -> BackboneReader[GatedMemory]:
        """The reader that every backbone has, for a copy of this one with the changed option."""
        if carried_share is None:
            return super().reader(memory, batch_size)
        other = copy.copy(self)
        other.config = replace(self.config, carried_share=carried_share)
        return other.reader(memory, batch_size)

    def forward(
        self,
        x: Tensor,
        memory: GatedMemory | None = None,
        *,
        starts: Tensor | None = None,
        lengths: Tensor | None = None,
        padding: Literal["right", "left"] = "right",
        implementation: str | None = None,
    ) -> BackboneOutput[GatedMemory]:
        """Read a segment."""
        memory = self.initial_memory(len(x)) if memory is None else memory
        return read_in_pieces(self._read, x, memory, starts, lengths, padding)

    def _read(self, x: Tensor, memory: GatedMemory) -> BackboneOutput[GatedMemory]:
        states, gates = [], []
        for n, (layer, output) in enumerate(zip(self.layers, self.outputs, strict=True)):
            gate, value = layer(x).chunk(2, -1)
            gate, state, read = gate.sigmoid(), memory.state[:, n], []
            for a, v in zip(gate.unbind(1), value.unbind(1), strict=True):
                state = self.config.carried_share * a * state + (1 - a) * v
                read.append(state)
            x = x + output(torch.stack(read, 1))
            states.append(state)
            gates.append(gate.detach().mean())
        seen = memory.tokens_seen + x.shape[1]
        after = GatedMemory(seen, torch.stack(states, 1))
        return BackboneOutput(x, after, x.new_zeros(()), {"gate": torch.stack(gates)})


register("gated-recurrence", GatedConfig)
