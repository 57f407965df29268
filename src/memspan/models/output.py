"""Outputs of a forward pass, the same for every architecture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from memspan.errors import MemspanError
from memspan.memory import Memory
from memspan.trees import tree

M = TypeVar("M", bound=Memory)


@tree
@dataclass(frozen=True)
class BackboneOutput(Generic[M]):
    """``hidden [B, T, D]``, the memory after the segment, and a scalar loss of the architecture's own
    (0 where it has none).

    ``statistics``: what the architecture reports about the pass, one number per layer, ``[L]``,
    without gradient."""

    hidden: Tensor
    memory: M
    auxiliary_loss: Tensor
    statistics: dict[str, Tensor] = field(default_factory=dict)


@tree
@dataclass(frozen=True)
class Output:
    """A language model's output: logits, or losses where targets were given."""

    memory: Memory
    auxiliary_loss: Tensor
    """The architecture's own loss, a scalar; 0 where it has none."""
    logits: Tensor | None = None
    """``[B, T, V]``, without targets only."""
    losses: Tensor | None = None
    """``[B, T]`` in nats, with targets only; 0 where a token is not scored."""
    n_scored: Tensor | None = None
    """Number of scored tokens, int64 scalar: neither padding nor a target of -100."""
    statistics: dict[str, Tensor] = field(default_factory=dict)

    @property
    def loss(self) -> Tensor:
        """The loss to train on, a scalar: the mean loss of the scored tokens plus the auxiliary loss.

        Raises:
            MemspanError: the model was called without targets.
        """
        if self.losses is None or self.n_scored is None:
            raise MemspanError("there is no loss without targets: call model(..., targets=targets)")
        return self.losses.sum() / self.n_scored.clamp(min=1) + self.auxiliary_loss
