"""The optimisers, and which parameters of a model each of their options is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor, nn

from memspan.models import LanguageModel
from memspan.training.options import OptimConfig


class Group(TypedDict):
    """Parameters that share their options."""

    params: list[Tensor]
    weight_decay: float
    factor: float
    """Multiplies the learning rate, see :func:`memspan.training.schedule.set_learning_rate`."""


@dataclass(frozen=True)
class Optimiser:
    """How an optimiser is made, and what it keeps for each parameter in ``optimizer.state``."""

    make: Callable[[list[Group], OptimConfig], torch.optim.Optimizer]
    moments: frozenset[str]
    """Tensors of the parameter's shape and type, and sharded as it is."""
    counts: frozenset[str]
    """Scalars in float32, on the CPU."""

    def check(self, name: str, values: dict[str, Tensor], parameter: Tensor) -> None:
        """Refuse a state that does not fit the parameter ``name``: fused updates trust its form.

        Raises:
            TypeError: names, a shape or a type differ.
        """
        forms = dict.fromkeys(self.moments, (parameter.shape, parameter.dtype))
        forms |= dict.fromkeys(self.counts, (torch.Size(()), torch.float32))
        if {name: (value.shape, value.dtype) for name, value in values.items()} != forms:
            raise TypeError(f"the optimiser's state of {name} has another form")


def _adamw(groups: list[Group], config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW: Loshchilov and Hutter, 2019, algorithm 2."""
    betas = (config.beta1, config.beta2)
    given = [dict(group) for group in groups]
    return torch.optim.AdamW(given, lr=config.learning_rate, betas=betas, fused=True)


OPTIMISERS = {
    "adamw": Optimiser(
        _adamw, moments=frozenset({"exp_avg", "exp_avg_sq"}), counts=frozenset({"step"})
    ),
}
"""By name."""
OPTIMISER = OPTIMISERS["adamw"]
"""The one that training uses."""


def groups_of(model: LanguageModel, config: OptimConfig) -> list[Group]:
    """All parameters: weight decay is for matrices and tables alone, not for biases and gains."""
    groups: list[Group] = []
    factors = (1.0, config.compression_learning_rate)
    for parameters, factor in zip(model.clip_groups(), factors, strict=False):
        ids = {id(p) for p in parameters}
        named = [(name, p) for name, p in model.named_parameters() if id(p) in ids]
        decayed: list[Tensor] = [p for name, p in named if _is_decayed(name, p)]
        others: list[Tensor] = [p for name, p in named if not _is_decayed(name, p)]
        groups += [
            {"params": decayed, "weight_decay": config.weight_decay, "factor": factor},
            {"params": others, "weight_decay": 0.0, "factor": factor},
        ]
    return groups


def _is_decayed(name: str, parameter: nn.Parameter) -> bool:
    # Some biases are matrices, with a row for each head.
    return parameter.dim() >= 2 and "bias" not in name


def optimiser_for(model: LanguageModel, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimiser of all of ``model``'s parameters."""
    return OPTIMISER.make(groups_of(model, config), config)
