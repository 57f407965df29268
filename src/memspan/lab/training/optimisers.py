"""The optimisers: torch's own by name, or one that the user's function makes; the learning rate.

A step with small stand-ins for the parameters shows what an optimiser keeps: its size, whether
checkpoints can hold it, and whether a checkpoint's state has its form.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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
Form = tuple[torch.dtype, int, bool]
SMALL = 8
"""The largest dimension of a stand-in."""
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
    if not hasattr(torch.optim, "Muon"):
        raise MemspanError(
            f"optim.optimiser muon needs PyTorch 2.9 or later, and this is {torch.__version__}: "
            "install it, or choose adamw or sgd"
        )
    matrices, others = ([_part(group, wanted) for group in groups] for wanted in (True, False))
    rate, momentum = config.learning_rate, config.beta1
    muon = torch.optim.Muon(matrices, rate, momentum=momentum, adjust_lr_fn="match_rms_adamw")
    return _Together(muon, _adamw(others, config))


def _part(group: dict[str, Any], matrices: bool) -> dict[str, Any]:
    """The backbone's weight matrices in a group, or the rest of it."""
    pairs = zip(group["names"], group["params"], strict=True)
    return group | _named([pair for pair in pairs if _is_weight_matrix(*pair) == matrices])


def _is_weight_matrix(name: str, parameter: Tensor) -> bool:
    # Tables of positions and some biases are matrices, too.
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
    """The options of a run, trained by the optimiser from ``own`` (None: the one that they name)."""
    if own is not None:
        optim = dataclasses.replace(config.optim, optimiser="own")
        return dataclasses.replace(config, optim=optim)
    if config.optim.optimiser == "own":
        raise MemspanError(
            "optim.optimiser own is made by a function of your own: give it from Python, as in "
            "memspan.train(..., optimiser=FUNCTION), likewise to memspan.resume and memspan.estimate"
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
        """``own`` makes it from the parameters' groups, in place of the one that ``config`` names.

        Raises:
            MemspanError: not an optimiser of these parameters, or its state cannot be saved.
        """
        make = own or partial(OPTIMISERS[config.optimiser], config=config)
        groups = groups_of(model, config)
        self._parameters = dict(model.named_parameters())
        self._small = {name: (small, values) for name, small, values in _tried(make, groups)}
        self.optimizer = _made(make, groups)
        self.name = config.optimiser if own is None else type(self.optimizer).__name__
        """For the user's own optimiser, the name of its class."""
        self._begun_with = _numbers(self.optimizer)
        self._elsewhere = elsewhere.kept(self.optimizer) if own is not None else None

    def step(self, learning_rate: float) -> None:
        """Update the parameters by their gradients."""
        set_learning_rate(self.optimizer, learning_rate)
        self.optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """Its state: ``PARAMETER/KEY``, and ``GROUP/KEY`` for numbers of a group that have changed."""
        if self._elsewhere is not None:
            _refuse_elsewhere(self.optimizer, self._elsewhere, drawn=False)
        names = {id(p): name for name, p in self._parameters.items()}
        found: dict[str, Tensor] = {}
        for parameter, values in self.optimizer.state.items():
            name, kept = names[id(parameter)], _tensors(values)
            if _forms(kept, parameter) != self._forms(name):
                raise MemspanError(
                    f"{self.name} keeps other state for {name} ({', '.join(kept)}) than for a small "
                    "parameter after one step, and could not be resumed: let it choose by names and "
                    "dimensions, not by sizes, and keep all from its first step on"
                )
            found |= {f"{name}/{key}": value for key, value in kept.items()}
        changed = _numbers(self.optimizer).items() - self._begun_with.items()
        return found | _tensors(dict(changed))

    def restore(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """The inverse of :meth:`tensors`, whose names are split here: ``PARAMETER``, then ``KEY``.

        State that it does not keep is dropped, such as the momentum of an ``sgd`` that now has none.

        Raises:
            TypeError: its state is missing or of another form.
        """
        for name, parameter in self._parameters.items():
            if values := saved.get(name):
                # Fused updates do not check it.
                if not self._forms(name).items() <= _forms(values, parameter).items():
                    raise TypeError(f"the optimiser's state of {name} has another form")
                self.optimizer.state[parameter] = {
                    key: like if like is None else _restored(values[key], like)
                    for key, like in self._small[name][1].items()
                }
        for number, group in enumerate(self.optimizer.param_groups):
            for key, value in saved.get(f"{number}", {}).items():
                if type(group.get(key, 0)) not in NUMBERS:
                    raise TypeError(f"the optimiser has no number {key}")
                group[key] = value.item()

    def _forms(self, name: str) -> dict[str, Form]:
        """The forms of its state for a parameter."""
        small, values = self._small[name]
        return _forms(_tensors(values), small)


def kept_bytes(model: LanguageModel, config: OptimConfig, own: MakeOptimiser | None) -> int:
    """Size of an optimiser's state for ``model``, which may be on the meta device."""
    make = own or partial(OPTIMISERS[config.optimiser], config=config)
    parameters = dict(model.named_parameters())
    return sum(
        value.itemsize * (parameters[name] if value.shape == small.shape else value).numel()
        for name, small, values in _tried(make, groups_of(model, config))
        for value in _tensors(values).values()
    )


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


def _tried(make: MakeOptimiser, groups: Groups) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Names of parameters, small stand-ins, and an optimiser's state for these after a step."""
    groups = [{**group, "params": [_stand_in(p) for p in group["params"]]} for group in groups]
    names = {id(p): n for g in groups for n, p in zip(g["names"], g["params"], strict=True)}
    parameters = [parameter for group in groups for parameter in group["params"]]
    # Without effect on the run's random numbers.
    with (
        torch.random.fork_rng(devices={p.device for p in parameters if p.is_cuda}),
        _other_random_numbers_kept(),
    ):
        optimizer = _made(make, groups)
        before = elsewhere.kept(optimizer)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        try:
            optimizer.step()
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise MemspanError(
                f"{type(optimizer).__name__} cannot make a step by gradients alone ({reason}): it gets "
                "no closure, and with fsdp sharded parameters; choose another optimiser"
            ) from error
        _refuse_elsewhere(optimizer, before)
    for owner, values in optimizer.state.items():
        for key, value in values.items() if id(owner) in names else [(owner, values)]:
            if id(owner) not in names or not _is_held(key, value):
                raise MemspanError(
                    f"{type(optimizer).__name__} keeps {str(key)[:40]!r}, {type(value).__name__}: "
                    "checkpoints hold only numbers and tensors, by name for each parameter"
                )
    for parameter in parameters:
        yield names[id(parameter)], parameter, optimizer.state.get(parameter, {})


@contextlib.contextmanager
def _other_random_numbers_kept() -> Iterator[None]:
    """Leave numpy's and Python's random numbers as they were."""
    ours, pythons = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(ours)  # noqa: NPY002
        random.setstate(pythons)


def _refuse_elsewhere(
    optimizer: torch.optim.Optimizer, before: Mapping[str, str], drawn: bool = True
) -> None:
    """Refuse what has changed since ``before`` where checkpoints do not hold it; ``drawn``: also if it
    is random numbers, which others may have drawn."""
    remedy = (
        "checkpoints do not hold that, and the run could not be resumed bit for bit: keep tensors and "
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
            "checkpoints would hold a copy for each, and the run could not be resumed bit for bit; "
            "keep a tensor of its own for each parameter"
        )


def _is_held(key: object, value: object) -> bool:
    """Whether checkpoints hold such a value for a parameter."""
    has_name = isinstance(key, str) and "/" not in key
    is_partial = any(part.is_partial() for part in getattr(value, "placements", ()))
    is_plain = type(value) in NUMBERS or isinstance(value, Tensor | None)
    return has_name and is_plain and not is_partial


def _stand_in(parameter: Tensor) -> nn.Parameter:
    """A small parameter with as many dimensions, and sharded likewise."""
    device = "cpu" if parameter.is_meta else parameter.device
    sizes = [min(n, SMALL) for n in parameter.shape]
    small = torch.zeros(sizes, dtype=parameter.dtype, device=device)
    return nn.Parameter(placed(small, parameter))


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


def _forms(values: Mapping[str, Tensor], parameter: Tensor) -> dict[str, Form]:
    """The form of a parameter's values, which is also that of its stand-in's."""
    return {
        key: (value.dtype, value.dim(), value.shape == parameter.shape)
        for key, value in values.items()
    }


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Numbers of its groups, except the learning rate, which the schedule sets."""
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
