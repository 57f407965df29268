"""Optimisers by name, and those that a function makes: updates, resumption, sizes, mistakes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch

import memspan
import tiny_runs
from architectures import randomise
from memspan.errors import MemspanError
from memspan.lab.commands.train import train as train_command
from memspan.lab.runs import checkpoints
from memspan.lab.training import metrics, updates
from memspan.lab.training.optimisers import OPTIMISERS, Groups, MakeOptimiser, Optimiser
from memspan.lab.training.options import OptimConfig
from tiny_runs import Odd

pytestmark = pytest.mark.usefixtures("tiny_text")
OWN: dict[str, MakeOptimiser] = {
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.5, centered=True),
    "adafactor": torch.optim.Adafactor,
    "odd": Odd,
    # One without a state, which takes some of the parameters alone, and of their options none.
    "heads": lambda groups: torch.optim.SGD(chosen(groups, "head")),
}
RATES = {"adamw": 1e-2, "muon": 1e-2, "sgd": 0.3, "rmsprop": 3e-3, "adafactor": 0.1, "odd": 0.5}
EVERY = (*OPTIMISERS, *OWN)


def chosen(groups: Groups, part: str) -> list[torch.Tensor]:
    pairs = [pair for g in groups for pair in zip(g["names"], g["params"], strict=True)]
    return [parameter for name, parameter in pairs if part in name]


def options(name: str, steps: int = 6, **optim: Any) -> memspan.RunConfig[Any]:
    """Options of a tiny run, with the optimiser if it has a name."""
    optim = {"optimiser": name if name in OPTIMISERS else "adamw", "warmup_steps": 2, **optim}
    return tiny_runs.options(
        optim=OptimConfig(learning_rate=RATES.get(name, 0.1), **optim), steps=steps
    )


def test_every_name_is_an_option() -> None:
    names = get_args(get_type_hints(OptimConfig)["optimiser"])
    assert names == (*OPTIMISERS, "own")


@pytest.mark.parametrize("name", EVERY)
def test_a_run_learns_and_goes_on_bit_for_bit(name: str) -> None:
    """From a checkpoint between others, after as many updates that were lost."""
    config = options(name, steps=24)
    own = OWN.get(name)
    whole = memspan.train(config, "whole", optimiser=own)
    with tiny_runs.cut_at(23):
        memspan.train(config, "cut", optimiser=own)
    assert tiny_runs.step_of("cut") == 22
    memspan.resume("cut", optimiser=own)
    tiny_runs.assert_same(whole, "cut")
    losses = [loss for _, loss in tiny_runs.validations(whole)]
    assert losses[-1] < losses[0] - 0.2 * (name != "heads")


@pytest.mark.parametrize("name", EVERY)
def test_dry_run_counts_what_it_keeps(name: str) -> None:
    config = options(name)
    own = OWN.get(name)
    state = tiny_runs.state_of(config, own)
    updates.Updater(state).update()
    names = {name for name, _ in state.model.named_parameters()}
    tensors = state.optimiser.tensors().items()
    size = sum(tensor.nbytes for name, tensor in tensors if name.rpartition("/")[0] in names)
    assert state.optimiser.kept_bytes() == size
    assert memspan.estimate(config, optimiser=own).needs["moments"] == size


def test_sgd_without_momentum_keeps_nothing() -> None:
    """Nor does it take up what a run with momentum has kept."""
    folder = memspan.train(options("sgd"), "run")
    memspan.resume(folder, config=options("sgd", steps=8, beta1=0.0))
    saved = checkpoints.latest(folder).load().training
    assert not [name for name in saved if name.startswith("optimizer/")]


def test_weight_decay_is_for_matrices_and_tables() -> None:
    """Not for biases, whatever their shape, nor for gains; the betas are the options'."""
    model = randomise(tiny_runs.state_of(options("adamw")).model)
    chosen = OptimConfig(learning_rate=0.1, weight_decay=0.3, beta1=0.8, beta2=0.95)
    optimizer = Optimiser(model, chosen).optimizer
    assert all(group["betas"] == (0.8, 0.95) for group in optimizer.param_groups)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        is_gain = name.endswith("norm.weight")
        decays = ("weight" in name and not is_gain) or name == "embedding.tables.0"
        torch.testing.assert_close(p.detach(), before[name] * (0.97 if decays else 1.0), msg=name)


def test_muon_is_for_matrices_of_layers_and_adamw_for_the_rest() -> None:
    """Both with the learning rate, decay and factors of all groups."""
    config = options("muon", beta1=0.8, weight_decay=0.3)
    model, twin = (tiny_runs.state_of(config).model for _ in range(2))
    ours = Optimiser(model, config.optim)
    others = dict(twin.named_parameters())
    names = [n for n, p in others.items() if n.endswith(".weight") and p.dim() == 2]
    matrices = [others.pop(name) for name in names if ".layers." in name]
    assert len(matrices) == 7
    tables = [others.pop("embedding.tables.0")]
    adamw = {"betas": (0.8, config.optim.beta2), "fused": True}
    theirs = [
        torch.optim.Muon(matrices, 0.01, 0.3, momentum=0.8, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(tables, 0.01, weight_decay=0.3, **adamw),
        torch.optim.AdamW(others.values(), 0.01, weight_decay=0.0, **adamw),
    ]
    for _ in range(2):
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        ours.step(0.01)
        for optimizer in theirs:
            optimizer.step()
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, other), name


def test_schedule_applies_to_custom_optimiser() -> None:
    """The rate that the function sets does not; the groups are those of all optimisers."""
    seen: list[Groups] = []

    def make(groups: Groups) -> torch.optim.Optimizer:
        seen.append(groups)
        return torch.optim.RMSprop(groups, lr=123.0)

    config = options("rmsprop", steps=3, schedule="constant", warmup_steps=4)
    folder = memspan.train(config, "run", optimiser=make)
    record = metrics.read(folder / "metrics.jsonl")[0]
    assert record["learning_rate"] == pytest.approx(3e-3 * 3 / 4)
    assert [group["lr"] for group in seen[-1]] == [record["learning_rate"]] * 2
    assert [group["weight_decay"] for group in seen[-1]] == [0.1, 0.0]
    names = {name for name, _ in memspan.load(folder).model.named_parameters()}
    assert {name for group in seen[-1] for name in group["names"]} == names
    assert len(seen) == 1


def test_parameters_left_out_stay() -> None:
    """And its gradients do not pile up."""
    state = tiny_runs.state_of(options("heads"), OWN["heads"])
    before = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    updates.Updater(state).update()
    moved = {n for n, p in state.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"head.biases.0"}
    assert all(parameter.grad is None for parameter in state.model.parameters())


def keeping(what: dict[Any, Any]) -> MakeOptimiser:
    """It keeps something for each parameter."""

    class Keeping(torch.optim.SGD):
        def step(self) -> None:  # type: ignore[override]
            super().step()
            for p in (p for group in self.param_groups for p in group["params"]):
                self.state[p].update(what)

    return Keeping


class Counting(torch.optim.SGD):
    """Keeps something that is no parameter's."""

    def step(self) -> None:  # type: ignore[override]
        self.state["steps"] = 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        ("sgd", "train takes a function or None as optimiser, not 'sgd'"),
        (lambda groups: None, "must return a torch.optim.Optimizer, not NoneType"),
        (lambda groups: torch.optim.SGD([torch.zeros(1)]), "not the model's: make it from"),
        (
            lambda groups: torch.optim.LBFGS(chosen(groups, "")),
            "cannot step from gradients alone",
        ),
        (keeping({"queue": [1.0]}), "Keeping keeps 'queue', list: checkpoints hold only numbers"),
        (keeping({"a/b": 1.0}), "Keeping keeps 'a/b', float"),
        (Counting, "Counting keeps 'steps', int"),
    ],
)
def test_unusable_optimiser_is_refused(make: Any, says: str) -> None:
    with pytest.raises(MemspanError) as refusal:
        memspan.train(options("adamw"), "run", optimiser=make)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not Path("run/checkpoints").exists()


def test_state_that_comes_later_is_not_saved() -> None:
    class Late(torch.optim.SGD):
        steps = 0

        def step(self) -> None:  # type: ignore[override]
            super().step()
            Late.steps += 1
            if Late.steps > 1:
                for p in self.param_groups[0]["params"]:
                    self.state[p]["late"] = 1

    with pytest.raises(MemspanError, match="not be resumed: keep all of it from the first step"):
        memspan.train(options("adamw"), "run", optimiser=Late)


class Hiding(torch.optim.SGD):
    """Each step depends on what ``hide`` changes."""

    def __init__(self, groups: Groups, hide: Callable[[Any, list[Any]], object]) -> None:
        super().__init__(groups)
        self.hide = hide
        self.kept = [0]
        self.inner = torch.optim.Adam(groups)
        self.generator = torch.Generator()
        self.buffer = torch.zeros(2)
        for group in self.param_groups:
            group.update(pair=(0, 0), mode="even", scales=torch.ones(2))

    def step(self) -> None:  # type: ignore[override]
        super().step()
        self.hide(self, [p for group in self.param_groups for p in group["params"]])


HIDDEN: dict[str, Callable[[Any, list[Any]], object]] = {
    "attribute 'count'": lambda own, _: setattr(own, "count", getattr(own, "count", 0) + 1),
    "attribute 'kept'": lambda own, _: own.kept.append(1),
    "attribute 'buffer'": lambda own, _: own.buffer.add_(1),
    "attribute 'generator'": lambda own, _: torch.randn(1, generator=own.generator),
    "attribute 'inner'": lambda own, _: own.inner.step(),
    "'pair' in group 0": lambda own, _: own.param_groups[0].update(pair=(1, 2)),
    "'mode' in group 1": lambda own, _: own.param_groups[1].update(mode="odd"),
    "'scales' in group 0": lambda own, _: own.param_groups[0]["scales"].mul_(2),
    "numpy's random numbers": lambda *_: np.random.rand(),  # noqa: NPY002
    "Python's random numbers": lambda *_: random.random(),
    "keeps one tensor, 'one'": lambda own, ps: [own.state[p].update(one=own.buffer) for p in ps],
    "or a parameter itself": lambda own, ps: [own.state[p].update(own=p.data) for p in ps],
}


@pytest.mark.parametrize("place", HIDDEN)
def test_state_kept_elsewhere_is_refused(place: str) -> None:
    """Checkpoints do not hold it: resumed, it would make other steps, in silence."""
    with pytest.raises(MemspanError) as refusal:
        memspan.train(options("adamw"), "run", optimiser=lambda g: Hiding(g, HIDDEN[place]))
    assert place in str(refusal.value)
    assert "\n" not in str(refusal.value)
    # At the first step, before there is anything to lose.
    assert not Path("run/checkpoints").exists()


def test_state_kept_elsewhere_later_is_not_saved() -> None:
    steps: list[int] = []

    def late(own: Any, parameters: list[torch.Tensor]) -> None:
        steps.append(1)
        if len(steps) > 1:
            own.buffer.add_(1)

    with pytest.raises(MemspanError, match="a step of Hiding changes attribute 'buffer'"):
        memspan.train(options("adamw"), "run", optimiser=lambda g: Hiding(g, late))
    memspan.train(options("adamw"), "same", optimiser=lambda g: Hiding(g, lambda *_: None))


def test_an_own_optimiser_is_given_again() -> None:
    config = memspan.load(memspan.train(options("odd"), "run", optimiser=Odd)).config
    assert config.optim.optimiser == "own"
    give = r"to memspan.train\(..., optimiser=FUNCTION\), and likewise to memspan.resume"
    for act in (
        lambda: memspan.resume("run"),
        lambda: train_command(["--resume", "run", "--train.steps", "8"]),
        lambda: memspan.estimate(config),
    ):
        with pytest.raises(MemspanError, match=give):
            act()


@pytest.mark.parametrize(
    ("first", "then", "own", "says"),
    [
        ("odd", "adamw", None, "--optim.optimiser cannot change from own to adamw when run is"),
        ("odd", "rmsprop", torch.optim.RMSprop, "run was trained by Odd, not by RMSprop: resume"),
        (
            "rmsprop",
            "rmsprop",
            OWN["rmsprop"],
            "state of embedding.tables.0 has another form): res",
        ),
        ("adamw", "sgd", None, "another could not continue from what this one keeps"),
        ("adamw", "odd", Odd, "cannot change from adamw to own"),
    ],
)
def test_only_the_same_optimiser_goes_on(first: str, then: str, own: Any, says: str) -> None:
    made_by = {"odd": Odd, "rmsprop": torch.optim.RMSprop}.get(first)
    memspan.train(options(first), "run", optimiser=made_by)
    with pytest.raises(MemspanError) as refusal:
        memspan.resume("run", config=options(then, steps=8), optimiser=own)
    assert says in str(refusal.value)


def test_other_numbers_of_the_same_function_hold_from_here_on() -> None:
    seen: list[torch.optim.Optimizer] = []

    def make(groups: Groups) -> torch.optim.Optimizer:
        seen.append(torch.optim.RMSprop(groups, alpha=0.5))
        return seen[-1]

    memspan.train(options("rmsprop"), "run", optimiser=torch.optim.RMSprop)
    memspan.resume("run", config=options("rmsprop", steps=8), optimiser=make)
    assert seen[-1].param_groups[0]["alpha"] == 0.5
