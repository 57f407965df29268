"""torch's GRU (Cho et al. 2014) as an architecture: its state is its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from memspan import Memory
from memspan.models import Backbone, BackboneConfig, BackboneOutput, read_in_pieces


@dataclass(frozen=True)
class GRUConfig(BackboneConfig):
    """A stack of GRUs."""

    n_layers: int = 2
    """Number of layers."""
    d_model: int = 64
    """Width of inputs, states and outputs."""

    def build(self) -> GRU:
        """The backbone."""
        return GRU(self)

    def least_parameters(self) -> int:
        """The numbers in all matrices."""
        return 6 * self.n_layers * self.d_model**2


@dataclass(frozen=True, repr=False)
class GRUMemory(Memory):
    """The state of every layer after the last step."""

    state: Tensor
    """``[B, L, D]``."""


class GRU(Backbone[GRUMemory]):
    """The stack over vectors. Reading does not depend on where a sequence is cut."""

    memory_type = GRUMemory
    config: GRUConfig

    def __init__(self, config: GRUConfig) -> None:
        super().__init__(config)
        self.layers = nn.GRU(config.d_model, config.d_model, config.n_layers, batch_first=True)

    def initial_memory(self, batch_size: int) -> GRUMemory:
        """Zeros."""
        weight = next(self.parameters())
        config = self.config
        state = weight.new_zeros(batch_size, config.n_layers, config.d_model)
        return GRUMemory(state.new_zeros(batch_size, dtype=torch.long), state)

    def forward(
        self,
        x: Tensor,
        memory: GRUMemory | None = None,
        *,
        starts: Tensor | None = None,
        lengths: Tensor | None = None,
        padding: Literal["right", "left"] = "right",
        implementation: str | None = None,
    ) -> BackboneOutput[GRUMemory]:
        """Read a segment."""
        memory = self.initial_memory(len(x)) if memory is None else memory
        if starts is None and lengths is None:
            return self._read(x, memory)
        return read_in_pieces(self._read, x, memory, starts, lengths, padding)

    def _read(self, x: Tensor, memory: GRUMemory) -> BackboneOutput[GRUMemory]:
        hidden, state = self.layers(x, memory.state.transpose(0, 1).contiguous())
        seen = memory.tokens_seen + x.shape[1]
        return BackboneOutput(hidden, GRUMemory(seen, state.transpose(0, 1)), x.new_zeros(()))
