"""The learning rate of every update."""

from __future__ import annotations

import math

import torch

from memspan.training.options import OptimConfig


def learning_rate(step: int, optim: OptimConfig, steps: int) -> float:
    """Learning rate of the update after ``step`` of ``steps``: linear warm-up, then the schedule.

    warmup-stable-decay: Hu et al. 2024 (arXiv 2404.06395), with a linear decay over a fifth of the run
    as in Hägele et al. 2024 (arXiv 2405.18392).
    """
    peak, begin = optim.learning_rate, optim.warmup_steps
    if step < begin:
        return peak * (step + 1) / begin
    if optim.schedule == "inverse-sqrt":
        return peak * math.sqrt(max(begin, 1) / (step + 1))
    if optim.schedule == "warmup-stable-decay":
        begin = max(begin, steps - (optim.decay_steps or -(-steps // 5)))
    if optim.schedule == "constant" or step < begin:
        return peak
    done = (step - begin) / max(1, steps - begin)
    left = (1 + math.cos(math.pi * done)) / 2 if optim.schedule == "cosine" else 1 - done
    floor = min(optim.min_learning_rate, peak)
    return floor + (peak - floor) * left


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set every group's rate to ``rate`` times the group's ``factor``, 1 if it has none."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("factor", 1.0)
