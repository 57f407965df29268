"""What a forward pass returns, the same for every architecture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from memspan.memory import Memory

M = TypeVar("M", bound=Memory)


@dataclass(frozen=True)
class BackboneOutput(Generic[M]):
    """``hidden [B, T, D]``, the memory after the segment, and a scalar loss of the architecture's own
    (0 where it has none).

    ``statistics``: what the architecture has to tell about the pass, one number per layer, ``[L]``,
    without gradient."""

    hidden: Tensor
    memory: M
    auxiliary_loss: Tensor
    statistics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Output:
    """A language model's output: ``logits [B, T, V]``, or ``losses [B, T]`` in nats where targets
    were given (no logits are kept then)."""

    memory: Memory
    auxiliary_loss: Tensor
    logits: Tensor | None = None
    losses: Tensor | None = None
    statistics: dict[str, Tensor] = field(default_factory=dict)
