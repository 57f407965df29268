"""Detects, locates and contains values that are not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memspan.data.streams import Segment
from memspan.distributed.processes import whole
from memspan.errors import counted
from memspan.memory import Memory

MOST_SKIPS_IN_A_ROW = 50
"""Consecutive skipped updates after which training stops: it does not recover from there."""


@dataclass
class Health:
    """Counts of what was not finite so far; part of every checkpoint."""

    skipped_updates: int = 0
    """Updates skipped because the loss or a gradient was not finite."""
    reset_memory_rows: int = 0
    """Rows of memory that held values that were not finite, and were emptied."""

    def __str__(self) -> str:
        return (
            f"{counted(self.skipped_updates, 'update')} skipped and "
            f"{counted(self.reset_memory_rows, 'row')} of memory emptied because they were not finite"
        )


def non_finite_rows(memory: Memory) -> Tensor | None:
    """bool ``[B]``: the rows that hold NaN or infinity; None if no row does."""
    floats = [t for t in memory.tensors().values() if t.is_floating_point() and t.numel()]
    # One pass in the usual case: a sum is finite only if all its terms are. Every device has float32;
    # if the sum overflows, each element is checked.
    if not floats or math.isfinite(sum(t.detach().sum(dtype=torch.float32) for t in floats)):
        return None
    rows = torch.stack([~t.isfinite().flatten(1).all(1) for t in floats]).any(0)
    return rows if rows.any() else None


def largest_gradients(model: nn.Module, n: int = 3) -> str:
    """The ``n`` parameters of ``model`` with the largest gradients and their norms, as text."""
    norms = {
        name: whole(p.grad.norm()).item()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    # NaN cannot be compared: it counts as the largest.
    order = sorted(norms, key=lambda name: math.inf if math.isnan(norms[name]) else norms[name])
    named = ", ".join(f"{name} {norms[name]:.3g}" for name in order[: -n - 1 : -1])
    return f"largest gradients: {named}"


def describe_position(segment: Segment, losses: Tensor) -> str:
    """The positions in the training text of the rows whose ``losses [B, T]`` are not finite, or of all
    rows if every loss is (and a gradient is not)."""
    bad = (~losses.isfinite()).any(1)
    rows = bad.nonzero()[:, 0].tolist() or list(range(len(bad)))
    length = segment.inputs.shape[1]
    named = [f"{first:,} to {first + length:,}" for first in segment.first[rows[:3]].tolist()]
    return f"tokens {', '.join(named)}{' and others' if len(rows) > 3 else ''} of the training text"
