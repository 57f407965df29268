"""Optimisers, torch's by name or made by the user's function, and the learning-rate schedule.

The first step shows which state an optimiser keeps; one that checkpoints cannot hold is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memspan.errors import MemspanError
from memspan.lab.distributed.processes import placed
from memspan.lab.runs.options import RunConfig
from memspan.lab.training import elsewhere
from memspan.lab.training.options import OptimConfig
from memspan.models import LanguageModel
from memspan.models.options import BackboneConfig

Groups = list[dict[str, Any]]
"""Groups of parameters as torch's optimisers take them: ``params``, their ``names``,
``weight_decay``, and ``factor``, which multiplies the learning rate."""
MakeOptimiser = Callable[[Groups], torch.optim.Optimizer]
Form = tuple[torch.dtype, torch.Size]
NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""Types of numbers, and of the tensors that hold them in checkpoints."""


def _adamw(groups: Groups, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW: Loshchilov and Hutter, 2019, algorithm 2."""
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=True)


def _muon(groups: Groups, config: OptimConfig) -> torch.optim.Optimizer:
    """Muon (Jordan et al., 2024) for the backbone's weight matrices, AdamW for all else.

    Steps are as long as AdamW's (Liu et al., 2025, section 2.2), so that both have one learning rate.
    """
    matrices, others = ([_part(group, wanted) for group in groups] for wanted in (True, False))
    rate = config.learning_rate
    momentum = config.beta1
    muon = torch.optim.Muon(matrices, rate, momentum=momentum, adjust_lr_fn="match_rms_adamw")
    return _Together(muon, _adamw(others, config))


def _part(group: dict[str, Any], matrices: bool) -> dict[str, Any]:
    """The backbone's weight matrices in a group, or the rest of it."""
    pairs = zip(group["names"], group["params"], strict=True)
    return group | _named([pair for pair in pairs if _is_weight_matrix(*pair) == matrices])


def _is_weight_matrix(name: str, parameter: Tensor) -> bool:
    # Tables of positions and some biases are also matrices.
    is_weight = name.startswith("backbone.") and "weight" in name.rpartition(".")[2]
    return is_weight and parameter.dim() == 2


class _Together(torch.optim.Optimizer):
    """Optimisers of different parameters as one, with the groups and the state of all."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self._parts:
            part.step()


def _sgd(groups: Groups, config: OptimConfig) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum."""
    return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.beta1)


OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "muon": _muon,
    "sgd": _sgd,
}
"""The optimisers, by the names that ``--optim.optimiser`` takes."""


def with_optimiser(
    config: RunConfig[BackboneConfig], own: MakeOptimiser | None
) -> RunConfig[BackboneConfig]:
    """A run's options, for the optimiser that ``own`` makes (None: the one that they name)."""
    if own is not None:
        optim = dataclasses.replace(config.optim, optimiser="own")
        return dataclasses.replace(config, optim=optim)
    if config.optim.optimiser == "own":
        raise MemspanError(
            "optim.optimiser own is made by your own function: pass it in Python to memspan.train(..., "
            "optimiser=FUNCTION), and likewise to memspan.resume and memspan.estimate"
        )
    return config


def groups_of(model: LanguageModel, config: OptimConfig) -> Groups:
    """All parameters; only matrices and tables have weight decay, not biases and gains."""
    groups: Groups = []
    factors = (1.0, config.compression_learning_rate)
    for parameters, factor in zip(model.clip_groups(), factors, strict=False):
        ids = {id(p) for p in parameters}
        named = [(name, p) for name, p in model.named_parameters() if id(p) in ids]
        for decayed in (True, False):
            part = _named([pair for pair in named if _is_decayed(*pair) == decayed])
            decay = config.weight_decay if decayed else 0.0
            groups.append({**part, "weight_decay": decay, "factor": factor})
    return groups


def _named(pairs: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
    return {"params": [p for _, p in pairs], "names": [name for name, _ in pairs]}


def _is_decayed(name: str, parameter: Tensor) -> bool:
    # Some biases are matrices, with a row for each head.
    return parameter.dim() >= 2 and "bias" not in name


class Optimiser:
    """Updates a model's parameters; its state is saved in checkpoints and restored."""

    def __init__(
        self, model: LanguageModel, config: OptimConfig, own: MakeOptimiser | None = None
    ) -> None:
        """Make the optimiser by ``own`` from groups of parameters (None: the one ``config`` names).

        Raises:
            MemspanError: ``own`` did not return an optimiser of these parameters.
        """
        make = own or partial(OPTIMISERS[config.optimiser], config=config)
        self._parameters = dict(model.named_parameters())
        self._names = {id(p): name for name, p in self._parameters.items()}
        self.optimizer = _made(make, groups_of(model, config))
        self.name = config.optimiser if own is None else type(self.optimizer).__name__
        """For the user's own optimiser, the name of its class."""
        self._begun_with = _numbers(self.optimizer)
        self._elsewhere = elsewhere.kept(self.optimizer) if own is not None else None
        self._forms: dict[str, dict[str, Form]] = {}
        """The form of the state of each parameter that has had a gradient."""
        self._has_stepped = False

    def step(self, learning_rate: float) -> None:
        """Update the parameters from their gradients.

        Raises:
            MemspanError: at the first step, if checkpoints cannot hold its state, or it needs more than
                gradients to step.
        """
        set_learning_rate(self.optimizer, learning_rate)
        if self._has_stepped:
            self.optimizer.step()
        else:
            self._first_step()

    def tensors(self) -> dict[str, Tensor]:
        """The state: ``PARAMETER/KEY``, and ``GROUP/KEY`` for a group's numbers that have changed."""
        if self._elsewhere is not None:
            _refuse_elsewhere(self.optimizer, self._elsewhere, drawn=False)
        found: dict[str, Tensor] = {}
        for name, kept in self._kept().items():
            if _forms(kept) != self._forms.setdefault(name, _forms(kept)):
                raise MemspanError(
                    f"{self.name} now keeps other state for {name} ({', '.join(kept)}) than after its "
                    "first step, so the run could not be resumed: keep all of it from the first step on"
                )
            found |= {f"{name}/{key}": value for key, value in kept.items()}
        changed = _numbers(self.optimizer).items() - self._begun_with.items()
        return found | _tensors(dict(changed))

    def restore(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """The inverse of :meth:`tensors`, whose names are split here: ``PARAMETER``, then ``KEY``.

        The parameters' values change, since a step by gradients of zero shows what it keeps. State that
        is no longer kept is dropped, such as the momentum of an ``sgd`` that now has none.

        Raises:
            TypeError: its state is missing or of another form.
        """
        for parameter in self._parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self._first_step()
        for parameter in self._parameters.values():
            parameter.grad = None
        trial = dict(self.optimizer.state)
        self.optimizer.state.clear()
        for name, parameter in self._parameters.items():
            if values := saved.get(name):
                # Fused updates do not check it, and would read beyond a tensor that is too small.
                wanted = self._forms[name].items()
                found = _forms(values).items()
                if not wanted <= found or (self._elsewhere is not None and wanted != found):
                    raise TypeError(f"the optimiser's state of {name} has another form")
                self.optimizer.state[parameter] = {
                    key: like if like is None else _restored(values[key], like)
                    for key, like in trial.get(parameter, {}).items()
                }
        for number, group in enumerate(self.optimizer.param_groups):
            begun = {key: f"{number}/{key}" for key in group}
            group |= {k: self._begun_with[n] for k, n in begun.items() if n in self._begun_with}
            for key, value in saved.get(f"{number}", {}).items():
                if type(group.get(key, 0)) not in NUMBERS:
                    raise TypeError(f"the optimiser has no number {key}")
                group[key] = value.item()

    def kept_bytes(self) -> int:
        """Size of the state in bytes."""
        return sum(value.nbytes for kept in self._kept().values() for value in kept.values())

    def _first_step(self) -> None:
        if self._elsewhere is None:
            self.optimizer.step()
        else:
            self._first_step_of_own()
        self._has_stepped = True
        kept = self._kept()
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._forms[name] = _forms(kept.get(name, {}))

    def _first_step_of_own(self) -> None:
        before = elsewhere.kept(self.optimizer)
        kind = type(self.optimizer).__name__
        try:
            self.optimizer.step()
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise MemspanError(
                f"{kind} cannot step from gradients alone ({reason}): it is called without a closure, "
                "and with fsdp its parameters are sharded; choose another optimiser"
            ) from error
        _refuse_elsewhere(self.optimizer, before)
        for owner, values in self.optimizer.state.items():
            entries = values.items() if id(owner) in self._names else [(owner, values)]
            for key, value in entries:
                if id(owner) not in self._names or not _is_held(key, value):
                    raise MemspanError(
                        f"{kind} keeps {str(key)[:40]!r}, {type(value).__name__}: checkpoints hold "
                        "only numbers and tensors, by name for each parameter"
                    )

    def _kept(self) -> dict[str, dict[str, Tensor]]:
        """The state as checkpoints hold it, by the parameters' names."""
        return {self._names[id(p)]: _tensors(kept) for p, kept in self.optimizer.state.items()}


def _made(make: MakeOptimiser, groups: Groups) -> torch.optim.Optimizer:
    given = {id(p) for group in groups for p in group["params"]}
    optimizer: object = make(groups)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise MemspanError(
            f"optimiser must return a torch.optim.Optimizer, not {type(optimizer).__name__}"
        )
    if not {id(p) for group in optimizer.param_groups for p in group["params"]} <= given:
        raise MemspanError(
            f"{type(optimizer).__name__} has parameters that are not the model's: make it from the "
            "groups that the function is called with"
        )
    return optimizer


def _refuse_elsewhere(
    optimizer: torch.optim.Optimizer, before: Mapping[str, str], drawn: bool = True
) -> None:
    """Refuse changes since ``before`` that checkpoints do not hold; ``drawn``: also those of random
    generators, which other code may have used."""
    remedy = (
        "checkpoints do not hold that, so the run could not be resumed bit for bit: keep tensors and "
        "numbers in its state for each parameter, numbers in its groups, and draw torch's random "
        "numbers"
    )
    name = type(optimizer).__name__
    for place in elsewhere.changed(before, elsewhere.kept(optimizer)):
        if drawn or "random numbers" not in place:
            raise MemspanError(f"a step of {name} changes {place}: {remedy}")
    if key := elsewhere.shared(optimizer):
        raise MemspanError(
            f"{name} keeps one tensor, {key[:40]!r}, for several parameters, or a parameter itself: "
            "checkpoints would hold a copy for each, so the run could not be resumed bit for bit; "
            "keep a separate tensor for each parameter"
        )


def _is_held(key: object, value: object) -> bool:
    """True if checkpoints hold such a value for a parameter."""
    has_name = isinstance(key, str) and "/" not in key
    is_partial = any(part.is_partial() for part in getattr(value, "placements", ()))
    is_plain = type(value) in NUMBERS or isinstance(value, Tensor | None)
    return has_name and is_plain and not is_partial


def _tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Values as a checkpoint holds them, without those that are None."""
    return {
        key: value if isinstance(value, Tensor) else torch.tensor(value, dtype=NUMBERS[type(value)])
        for key, value in values.items()
        if value is not None
    }


def _restored(value: Tensor, like: Any) -> Any:
    """A checkpoint's value in the form of ``like``."""
    return placed(value.to(like.device), like) if isinstance(like, Tensor) else value.item()


def _forms(values: Mapping[str, Tensor]) -> dict[str, Form]:
    return {key: (value.dtype, value.shape) for key, value in values.items()}


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Numbers in the groups, except the learning rate, which the schedule sets."""
    return {
        f"{number}/{key}": value
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if type(value) in NUMBERS and key != "lr"
    }


def learning_rate(step: int, optim: OptimConfig, steps: int) -> float:
    """Learning rate of the update after ``step`` of ``steps``: linear warm-up, then the schedule.

    warmup-stable-decay: Hu et al. 2024 (arXiv 2404.06395), with a linear decay over a fifth of the run
    as in Hägele et al. 2024 (arXiv 2405.18392).
    """
    peak = optim.learning_rate
    begin = optim.warmup_steps
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
