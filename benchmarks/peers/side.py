"""Interface of every side of a comparison. An adapter is a subclass; throughput.py lists them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB_SIZE = 256


@dataclass(frozen=True)
class Size:
    """Sizes of a model and of its work."""

    d_model: int
    n_heads: int
    n_layers: int
    d_ff: int
    segment_length: int
    memory_length: int
    batch_size: int
    generate_batch: int = 1
    works: tuple[str, ...] = ("train", "evaluate", "generate")
    compressed_length: int = 0
    """Compressed slots, each of four tokens."""
    auxiliary_loss: bool = True
    """Add the compression's own loss in training, where there is one."""
    dropout: float = 0.0
    """Probability of everything that a side can drop, in training."""
    alone: bool = False
    """memspan alone: peers would take too long."""

    @property
    def span(self) -> int:
        return self.compressed_length + self.memory_length + self.segment_length


class Side(ABC):
    """A model and the memory that it carries from call to call."""

    works: ClassVar[tuple[str, ...]] = ("train", "evaluate", "generate")
    """Works that this side can do."""
    same_function: ClassVar[bool] = False
    """It computes the same numbers as ours after ``weights_to``; checked before any timing."""

    model: nn.Module

    def __init__(self, size: Size) -> None:
        self.size = size

    @abstractmethod
    def forget(self, batch_size: int) -> None:
        """Start with an empty memory, in the mode set by ``model.train`` or ``model.eval``."""

    def logits(self, tokens: Tensor) -> Tensor:
        """``[B, T, V]``; the memory moves on. For sides that have ``loss`` and ``read`` from here."""
        raise NotImplementedError

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of a segment ``[B, T]``, with its graph; the memory moves on, detached."""
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def read(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Without gradients: logits ``[B, T, V]``, or losses ``[B, T]``; the memory moves on."""
        logits = self.logits(tokens)
        if targets is None:
            return logits
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")

    def attention(self, x: Tensor) -> Tensor:
        """The first layer's attention by itself, ``[B, T, D]``, nothing remembered; with its graph."""
        raise NotImplementedError

    def weights_to(self, ours: nn.Module) -> None:
        """Copy the weights into our model; only where ``same_function``."""
        raise NotImplementedError

    def embedding(self) -> Tensor:
        """The embedding table, whose gradient is compared; only where ``same_function``."""
        raise NotImplementedError

    def optimizer(self) -> torch.optim.Optimizer:
        """The same for all sides."""
        return torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
