"""Optimisers by name, and those that a function makes: updates, resumption, sizes, mistakes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, get_args, get_type_hints

import pytest
import torch

import memspan
import tiny_runs
from memspan.commands.train import train as train_command
from memspan.errors import MemspanError
from memspan.runs import checkpoints
from memspan.runs.options import read_config
from memspan.training import metrics, updates
from memspan.training.optimisers import (
    OPTIMISERS,
    Groups,
    MakeOptimiser,
    Optimiser,
    groups_of,
    kept_bytes,
    set_learning_rate,
)
from memspan.training.options import OptimConfig
from odd_optimiser import Odd

pytestmark = pytest.mark.usefixtures("tiny_text")
OWN: dict[str, MakeOptimiser] = {
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.5, centered=True),
    "adafactor": torch.optim.Adafactor,
    "odd": Odd,
    # One without a state, which takes some of the parameters alone, and of their options none.
    "heads": lambda groups: torch.optim.SGD(chosen(groups, "head")),
}
RATES = {"adamw": 1e-2, "muon": 1e-2, "sgd": 0.3, "rmsprop": 3e-3, "adafactor": 0.1, "odd": 0.5}
needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch before 2.9")
EVERY = [
    pytest.param(name, marks=needs_muon) if name == "muon" else name for name in (*OPTIMISERS, *OWN)
]


def chosen(groups: Groups, part: str) -> list[torch.Tensor]:
    pairs = [pair for g in groups for pair in zip(g["names"], g["params"], strict=True)]
    return [parameter for name, parameter in pairs if part in name]


def options(name: str, steps: int = 6, **optim: Any) -> memspan.RunConfig[Any]:
    """Of a tiny run, with the optimiser if it has a name."""
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
    config, own = options(name, steps=24), OWN.get(name)
    whole = memspan.train(config, "whole", optimiser=own)
    with tiny_runs.cut_at(23):
        memspan.train(config, "cut", optimiser=own)
    assert tiny_runs.step_of("cut") == 22
    memspan.resume("cut", optimiser=own)
    tiny_runs.assert_same(whole, "cut")
    losses = [loss for _, loss in tiny_runs.validations(whole)]
    assert losses[-1] < losses[0] - 0.2 * (name != "heads")


@pytest.mark.parametrize("name", EVERY)
def test_a_dry_run_counts_what_it_keeps(name: str) -> None:
    config, own = options(name), OWN.get(name)
    state = tiny_runs.state_of(config, own)
    updates.Updater(state).update()
    size = whole = 0
    for parameter, values in state.optimiser.optimizer.state.items():
        for value in values.values():
            number = 1 if isinstance(value, bool) else 8 * isinstance(value, int | float)
            size += value.nbytes if isinstance(value, torch.Tensor) else number
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                whole += value.nbytes
    counted = kept_bytes(state.model, config.optim, own)
    if name in ("adafactor", "odd"):
        # Means over rows or columns are counted as those of small stand-ins.
        assert whole < counted < size
    else:
        assert counted == size


def test_sgd_without_momentum_keeps_nothing() -> None:
    """Nor does it take up what a run with momentum has kept."""
    config = options("sgd", beta1=0.0)
    assert kept_bytes(tiny_runs.state_of(config).model, config.optim, None) == 0
    folder = memspan.train(options("sgd"), "run")
    memspan.resume(folder, config=options("sgd", steps=8, beta1=0.0))
    saved = checkpoints.latest(folder).load().training
    assert not [name for name in saved if name.startswith("optimizer/")]


def test_weight_decay_is_for_matrices_and_tables() -> None:
    """Not for biases, whatever their shape, nor for gains; the betas are the options'."""
    model = tiny_runs.state_of(options("adamw")).model
    chosen = OptimConfig(learning_rate=0.1, weight_decay=0.3, beta1=0.8, beta2=0.95)
    optimizer = Optimiser(model, chosen).optimizer
    names = {id(p): name for name, p in model.named_parameters()}
    decay = {
        names[id(p)]: group["weight_decay"]
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert set(decay) == set(names.values())
    assert (
        decay["embedding.tables.0"] == decay["backbone.layers.0.feed_forward.inner.weight"] == 0.3
    )
    assert decay["backbone.content_bias"] == decay["head.biases.0"] == 0
    assert decay["backbone.layers.0.attention_norm.weight"] == 0
    assert all(group["betas"] == (0.8, 0.95) for group in optimizer.param_groups)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] * (1 - 0.1 * decay[name]))


@needs_muon
def test_muon_is_for_matrices_of_layers_and_adamw_for_the_rest() -> None:
    """Both with the learning rate, decay and factors of all groups."""
    config = options("muon", beta1=0.8, weight_decay=0.3)
    model = tiny_runs.state_of(config).model
    twin = tiny_runs.state_of(config).model
    ours = Optimiser(model, config.optim)
    groups = groups_of(twin, config.optim)
    parameters = dict(twin.named_parameters())
    matrices = [n for n in parameters if n.endswith(".weight") and ".layers." in n]
    matrices = [n for n in matrices if parameters[n].dim() == 2]
    assert len(matrices) == 7
    others = [
        {**group, "params": [p for p in group["params"] if p.dim() != 2 or p is table]}
        for table in [parameters["embedding.tables.0"]]
        for group in groups
    ]
    theirs = [
        torch.optim.Muon(
            [parameters[name] for name in matrices],
            momentum=0.8,
            weight_decay=0.3,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(others, betas=(0.8, config.optim.beta2), fused=True),
    ]
    for _ in range(2):
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        ours.step(0.01)
        for optimizer in theirs:
            set_learning_rate(optimizer, 0.01)
            optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, parameters[name]), name


def test_muon_is_not_in_older_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(MemspanError, match=r"muon needs PyTorch 2\.9 or later"):
        memspan.train(options("muon"), "run")
    assert not Path("run").exists()


def test_the_schedule_holds_for_an_own_optimiser() -> None:
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
    model = memspan.load(folder).model
    assert {n for group in seen[-1] for n in group["names"]} == dict(
        model.named_parameters()
    ).keys()
    # The stand-ins have as many dimensions.
    for small, real in zip(seen[0], seen[-1], strict=True):
        assert small["names"] == real["names"]
        assert [p.dim() for p in small["params"]] == [p.dim() for p in real["params"]]


def test_what_the_function_leaves_out_stays() -> None:
    """And its gradients do not pile up."""
    state = tiny_runs.state_of(options("heads"), OWN["heads"])
    before = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    updates.Updater(state).update()
    moved = {n for n, p in state.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"head.biases.0"}
    assert all(parameter.grad is None for parameter in state.model.parameters())


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(MemspanError) as error:
        act()
    assert "\n" not in str(error.value)
    return str(error.value)


class Keeping(torch.optim.SGD):
    """Keeps something."""

    what: ClassVar[dict[Any, Any]] = {}
    least = 0

    def step(self) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].update(self.what if p.numel() > self.least else {})


def keeping(what: dict[Any, Any], least: int = 0) -> MakeOptimiser:
    return type("Keeping", (Keeping,), {"what": what, "least": least})


class Counting(torch.optim.SGD):
    """Keeps something that is no parameter's."""

    def step(self) -> None:  # type: ignore[override]
        self.state["steps"] = 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            "sgd",
            "must be a function that makes one from parameter groups, not str: for one by name",
        ),
        (lambda groups: None, "must return a torch.optim.Optimizer, not NoneType"),
        (
            lambda groups: torch.optim.SGD([torch.zeros(1)]),
            "that are not the model's: make it from",
        ),
        (
            lambda groups: torch.optim.LBFGS(chosen(groups, "")),
            "LBFGS cannot make a step by gradients al",
        ),
        (
            keeping({"queue": [1.0]}),
            "Keeping keeps 'queue', list: checkpoints hold only numbers",
        ),
        (keeping({"a/b": 1.0}), "Keeping keeps 'a/b', float"),
        (Counting, "Counting keeps 'steps', int"),
    ],
)
def test_what_is_no_optimiser_of_ours(make: Any, says: str) -> None:
    said = refusal(lambda: memspan.train(options("adamw"), "run", optimiser=make))
    assert says in said
    assert not Path("run").exists()


def test_what_could_not_be_resumed_is_not_saved() -> None:
    """Here a choice by sizes, which stand-ins do not have."""
    make = keeping({"large": 1}, least=64)
    said = refusal(lambda: memspan.train(options("adamw"), "run", optimiser=make))
    assert "could not be resumed: let it choose by names and dimensions" in said


def test_an_own_optimiser_is_given_again() -> None:
    folder = memspan.train(options("odd"), "run", optimiser=Odd)
    more = options("odd", steps=8)
    assert read_config(folder / "config.toml").optim.optimiser == "own"
    give = "as in memspan.train(..., optimiser=FUNCTION), likewise to memspan.resume"
    assert give in refusal(lambda: memspan.resume(folder))
    assert give in refusal(lambda: train_command(["--resume", "run", "--train.steps", "8"]))
    assert give in refusal(lambda: memspan.estimate(memspan.load(folder).config))
    cannot = "--optim.optimiser cannot change from own to adamw when run is resumed"
    assert cannot in refusal(lambda: memspan.resume(folder, config=more))
    said = refusal(lambda: memspan.resume(folder, config=more, optimiser=torch.optim.RMSprop))
    assert "run was trained by Odd, not by RMSprop: resume it with the function" in said
    memspan.resume(folder, config=more, optimiser=Odd)
    assert checkpoints.latest(folder).state["step"] == 8


def test_a_function_that_has_changed() -> None:
    """Other numbers hold from here on; what the checkpoint has not kept is missed."""
    folder = memspan.train(options("rmsprop"), "run", optimiser=torch.optim.RMSprop)
    more = options("rmsprop", steps=8)
    again: MakeOptimiser = lambda groups: torch.optim.RMSprop(groups, centered=True)  # noqa: E731
    said = refusal(lambda: memspan.resume(folder, config=more, optimiser=again))
    assert (
        "the optimiser's state of embedding.tables.0 has another form): restore both, and" in said
    )
    seen: list[torch.optim.Optimizer] = []

    def other(groups: Groups) -> torch.optim.Optimizer:
        seen.append(torch.optim.RMSprop(groups, alpha=0.5))
        return seen[-1]

    memspan.resume(folder, config=more, optimiser=other)
    assert seen[-1].param_groups[0]["alpha"] == 0.5


def test_a_named_one_stays() -> None:
    folder = memspan.train(options("adamw"), "run")
    for config, own in ((options("sgd", steps=8), None), (options("odd", steps=8), Odd)):
        said = refusal(lambda: memspan.resume(folder, config=config, optimiser=own))  # noqa: B023
        assert "cannot change from adamw to" in said
        assert "another could not continue from what this one keeps" in said
