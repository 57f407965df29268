"""The optimiser, and the learning rate of every update."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from memspan.models import LanguageModel
from memspan.runs.options import RunConfig
from memspan.training.options import OptimConfig


def adamw(model: LanguageModel, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW, with weight decay for matrices and tables alone.

    A parameter group's ``factor`` multiplies its learning rate, see :func:`set_learning_rate`.
    """
    groups = []
    for parameters, factor in zip(
        model.clip_groups(), (1.0, config.compression_learning_rate), strict=False
    ):
        ids = {id(p) for p in parameters}
        decayed: list[Tensor] = []
        free: list[Tensor] = []
        for name, parameter in model.named_parameters():
            if id(parameter) in ids:
                matrix = parameter.dim() >= 2 and "bias" not in name
                (decayed if matrix else free).append(parameter)
        groups += [
            {"params": decayed, "weight_decay": config.weight_decay, "factor": factor},
            {"params": free, "weight_decay": 0.0, "factor": factor},
        ]
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """``rate`` for every parameter, times its group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["factor"]


def learning_rate(step: int, config: RunConfig[Any]) -> float:
    """Learning rate of the update that follows ``step`` updates: linear warm-up, then the schedule."""
    optim, steps = config.optim, config.train.steps
    if step < optim.warmup_steps:
        return optim.learning_rate * (step + 1) / optim.warmup_steps
    if optim.schedule == "inverse-sqrt":
        return optim.learning_rate * math.sqrt(max(optim.warmup_steps, 1) / (step + 1))
    if optim.schedule == "constant":
        return optim.learning_rate
    done = (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps)
    floor = min(optim.min_learning_rate, optim.learning_rate)
    return floor + (optim.learning_rate - floor) * (1 + math.cos(math.pi * done)) / 2
