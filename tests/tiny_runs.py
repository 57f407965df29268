"""A run of six steps, for tests of what may happen to it and to its folder; an odd optimiser."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from memspan.lab.data.options import DataConfig
from memspan.lab.data.prepared import prepare
from memspan.lab.runs import checkpoints
from memspan.lab.runs.options import RunConfig
from memspan.lab.training import metrics, updates
from memspan.lab.training.optimisers import MakeOptimiser
from memspan.lab.training.options import OptimConfig, TrainConfig
from memspan.lab.training.state import TrainingState
from memspan.models.registry import MODELS
from memspan.models.transformer_xl.config import TransformerXLConfig

TEXT = "memory is what remains of what was read. " * 30
OPTIONS = RunConfig(
    model=TransformerXLConfig(n_layers=1, d_model=8, n_heads=2, d_ff=8, memory_length=4),
    data=DataConfig(corpus="text.txt"),
    optim=OptimConfig(warmup_steps=2),
    train=TrainConfig(
        steps=6,
        batch_size=2,
        segment_length=4,
        evaluate_every=3,
        evaluate_tokens=32,
        save_every=2,
        sample_tokens=0,
        device="cpu",
    ),
)


def options(
    model: Any = OPTIONS.model, optim: OptimConfig = OPTIONS.optim, **loop: Any
) -> RunConfig[Any]:
    """:data:`OPTIONS` but for the model, the optimiser or some options of the training loop."""
    name = next(name for name, kind in MODELS.items() if type(model) is kind)
    train = replace(OPTIONS.train, **loop)
    return replace(OPTIONS, model=model, architecture=name, optim=optim, train=train)


def model_of(architecture: str, **sizes: Any) -> Any:
    """The options of a model, with those of the sizes that its architecture has."""
    kind = MODELS[architecture]
    known = {field.name for field in fields(kind)}
    return kind(**{name: size for name, size in sizes.items() if name in known})


def state_of(config: RunConfig[Any], optimiser: MakeOptimiser | None = None) -> TrainingState:
    """State of a run before its first step."""
    prepared = prepare(config.data.texts, config.data.tokenizer, config.data.vocab_size)
    return TrainingState(config, prepared, torch.device("cpu"), optimiser=optimiser)


class PowerCut(BaseException):
    """No handler of ours catches it, as none runs when the power goes."""


def power_cut(state: TrainingState) -> None:
    raise PowerCut


@contextmanager
def at_step(step: int, act: Callable[[TrainingState], object]) -> Iterator[None]:
    """Inside, ``act`` is called once, before the update that follows ``step`` updates."""
    original = updates.Updater.update
    left = [act]

    def update(self: updates.Updater) -> torch.Tensor | None:
        if self.state.step == step and left:
            left.pop()(self.state)
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates.Updater, "update", update)
        yield


@contextmanager
def cut_at(step: int) -> Iterator[None]:
    """Inside, the power goes before that update."""
    with at_step(step, power_cut), pytest.raises(PowerCut):
        yield


def spoil_memory(state: TrainingState, row: int, value: float = math.nan) -> None:
    """Fill a row of memory with a value that is not finite."""

    def spoilt(t: torch.Tensor) -> torch.Tensor:
        chosen = (torch.arange(len(t)) == row % len(t)).view(-1, *[1] * (t.dim() - 1))
        return t.masked_fill(chosen, value) if t.is_floating_point() else t

    state.memory = state.memory.map(spoilt)


def step_of(folder: str | Path) -> int:
    """The step of the newest checkpoint."""
    return checkpoints.latest(Path(folder)).state["step"]


def content(folder: str | Path) -> dict[str, bytes]:
    """All that a run comes to, but for records of its speed and what follows its last checkpoint."""
    apart = ("metrics.jsonl", "scores.json", "samples.jsonl")
    files = (p for p in Path(folder).rglob("*") if p.is_file() and p.name not in apart)
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


def assert_same(a: str | Path, b: str | Path) -> None:
    """The newest checkpoints are alike bit for bit, and so are the validations."""
    ours, theirs = (checkpoints.latest(Path(folder)).load() for folder in (a, b))
    assert ours.state == theirs.state | {"files": ours.state["files"]}
    for mine, other in ((ours.weights, theirs.weights), (ours.training, theirs.training)):
        assert mine.keys() == other.keys()
        for name in mine:
            assert torch.equal(mine[name], other[name]), name
    assert validations(a) == validations(b)


def validations(folder: str | Path) -> list[tuple[int, Any]]:
    """Steps and losses of the validations, in order."""
    name = "validation_nats_per_token"
    records = metrics.read(Path(folder) / "metrics.jsonl")
    return [(record["step"], record[name]) for record in records if name in record]


class Odd(torch.optim.Optimizer):
    """It keeps all kinds of things, also in its groups, of which the next step depends on each; and it
    draws random numbers."""

    def __init__(self, groups: list[dict[str, Any]], noise: float = 1e-3) -> None:
        super().__init__(groups, {"lr": 1.0, "noise": noise, "steps": 0, "scale": 1.0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            group["scale"] *= 0.9
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def update(
        self, p: torch.Tensor, gradient: torch.Tensor, state: Any, group: dict[str, Any]
    ) -> None:
        if not state:
            rows = torch.zeros_like(gradient[..., :1]) if p.dim() > 1 else torch.zeros_like(p)
            state |= {"count": 0, "size": 0.5, "is_odd": False, "unused": None, "rows": rows}
            state["mean"] = torch.zeros_like(p, dtype=torch.bfloat16)
        # Of Python's own types, as they were.
        assert [type(state[key]) for key in ("count", "size", "is_odd")] == [int, float, bool]
        state["count"] += 1
        state["size"] = 0.9 * state["size"] + 0.1 * group["scale"] / group["steps"]
        state["is_odd"] = not state["is_odd"]
        state["rows"].lerp_(gradient.mean(-1, keepdim=True) if p.dim() > 1 else gradient, 0.5)
        state["mean"].lerp_(gradient.bfloat16(), 0.1)
        step = state["mean"].float() + state["rows"] + state["size"] * gradient
        step = step * (1 + state["is_odd"]) / state["count"]
        if group["noise"]:
            step = step + group["noise"] * torch.randn_like(step)
        p.add_(step, alpha=-group["lr"])
