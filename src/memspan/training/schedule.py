"""The learning rate of every update."""

from __future__ import annotations

import math

import torch

from memspan.training.options import OptimConfig


def learning_rate(step: int, optim: OptimConfig, steps: int) -> float:
    """Learning rate of the update after ``step`` of ``steps``: linear warm-up, then the schedule."""
    if step < optim.warmup_steps:
        return optim.learning_rate * (step + 1) / optim.warmup_steps
    if optim.schedule == "inverse-sqrt":
        return optim.learning_rate * math.sqrt(max(optim.warmup_steps, 1) / (step + 1))
    if optim.schedule == "constant":
        return optim.learning_rate
    done = (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps)
    floor = min(optim.min_learning_rate, optim.learning_rate)
    return floor + (optim.learning_rate - floor) * (1 + math.cos(math.pi * done)) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set every group's rate to ``rate`` times the group's ``factor``, 1 if it has none."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("factor", 1.0)
