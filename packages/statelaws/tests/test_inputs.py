"""Inputs of other kinds than tokens and vectors: images, several by name, those of strided encoders."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from statelaws import Claims, Function, Inputs, check

OBSERVATIONS = Inputs(
    parts={
        "image": Inputs(shape=(3, 6, 6)),
        "speed": Inputs(width=2, dtype=torch.float64),
        "action": Inputs(vocab_size=5),
    }
)


def policy(forgets: bool = False) -> Function:
    """A policy that sees an image, a speed and its last action, and remembers."""
    torch.manual_seed(0)
    net = nn.ModuleDict(
        {
            "see": nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten()),
            "did": nn.Embedding(5, 4),
            "remember": nn.GRU(70, 12, batch_first=True),
            "act": nn.Linear(12, 5),
        }
    )

    def read(x: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        rows, steps = x["action"].shape
        seen = net["see"](x["image"].flatten(0, 1)).view(rows, steps, -1)
        parts = [seen, x["speed"].float(), net["did"](x["action"])]
        y, after = net["remember"](torch.cat(parts, 2), state)
        return net["act"](y), state if forgets and steps == 1 else after

    def start(rows: int) -> Tensor:
        return torch.zeros(1, rows, 12)

    return Function(read, start, OBSERVATIONS, net, batch_dimension=1)


def test_a_dictionary_of_observations_is_given_as_it_was_drawn() -> None:
    drawn = OBSERVATIONS.draw(2, 5, torch.Generator().manual_seed(0))
    given = OBSERVATIONS.given(drawn)
    assert {name: (each.shape, each.dtype) for name, each in given.items()} == {
        "image": ((2, 5, 3, 6, 6), torch.float32),
        "speed": ((2, 5, 2), torch.float64),
        "action": ((2, 5), torch.int64),
    }
    assert given["action"].unique().tolist() == [0, 1, 2, 3, 4]
    later = OBSERVATIONS.given(drawn[1:, 3:])
    assert all(torch.equal(later[name], each[1:, 3:]) for name, each in given.items())


def test_a_policy_over_observations_breaks_no_law() -> None:
    report = check(policy())
    outcomes = {f.law: f.outcome for f in report.findings if f.outcome != "holds"}
    assert set(outcomes.values()) <= {"not-offered"}, str(report)
    assert "cuts" not in outcomes


def test_a_policy_that_forgets_is_found_and_its_script_runs() -> None:
    finding = check(policy(forgets=True), ["cuts"])["cuts"]
    assert finding.outcome == "broken"
    assert finding.script is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), torch.enable_grad():
        exec(finding.script, {"model": policy(forgets=True)})
    assert float(printed.getvalue()) > 1e-3


def encoder(keeps: bool = True) -> Function:
    """A frame for every four samples, by two strided convolutions that keep the ends they need."""
    torch.manual_seed(1)
    net = nn.ModuleList([nn.Conv1d(1, 4, 4, 2), nn.Conv1d(4, 6, 4, 2)])

    def read(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        first = torch.cat([state[0], x.mT], 2)
        y = net[0](first).relu()
        second = torch.cat([state[1] if keeps else torch.zeros_like(state[1]), y], 2)
        return net[1](second).mT, (first[..., -2:], second[..., -2:])

    def start(rows: int) -> Any:
        return torch.zeros(rows, 1, 2), torch.zeros(rows, 4, 2)

    return Function(read, start, Inputs(width=1, per_output=4), net)


def test_an_encoder_with_strides_is_read_by_its_outputs() -> None:
    right = check(encoder())
    assert not right.broken, right
    assert {right[law].outcome for law in ("cuts", "causality", "rows", "values")} == {"holds"}
    assert [finding.law for finding in check(encoder(keeps=False), ["cuts"]).broken] == ["cuts"]


def chunks(ahead: int) -> Function:
    """Each frame sees all of its chunk of four, and a mean of the chunks before."""
    torch.manual_seed(2)
    net = nn.Linear(3, 8)

    def read(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for part in net(x).split(4, 1):
            outputs.append((part + part.mean(1, keepdim=True) + state[:, None]).tanh())
            state = (state + part.mean(1)) / 2
        return torch.cat(outputs, 1), state

    claims = Claims(cuts=4, looks_ahead=ahead)
    return Function(read, lambda rows: torch.zeros(rows, 8), Inputs(width=3), net, claims)


def test_outputs_may_depend_on_as_many_later_steps_as_is_said() -> None:
    assert check(chunks(3), ["causality"])["causality"].outcome == "holds"
    assert check(chunks(2), ["causality"])["causality"].outcome == "broken"


class Experts(nn.Module):
    """Two experts with room for two tokens of a call each: who comes late is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 2)
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        best = self.router(x).argmax(1)
        outputs = []
        for i, expert in enumerate(self.experts):
            mine = best == i
            served = mine & (mine.cumsum(0) <= 2)
            outputs.append(torch.where(served[:, None], expert(x), 0))
        return sum(outputs, x)


def experts(claims: Claims) -> Function:
    torch.manual_seed(3)
    net = nn.ModuleList([Experts(), nn.GRUCell(4, 4)])

    def read(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for t in range(x.shape[1]):
            h = net[1](net[0](x[:, t]), h)
            outputs.append(h)
        return torch.stack(outputs, 1), h

    return Function(read, lambda rows: torch.zeros(rows, 4), Inputs(width=4), net, claims)


def test_experts_that_depend_on_the_batch_are_named_as_such() -> None:
    finding = check(experts(Claims()), ["rows"])["rows"]
    assert finding.outcome == "broken"
    assert "so not by the state: such are experts with room for so many tokens" in finding.detail
    finding = check(experts(Claims(rows=False)), ["rows"])["rows"]
    assert (finding.outcome, finding.detail[-9:]) == ("not-offered", "by design")


@pytest.mark.parametrize(
    "options", [{}, {"width": 3, "vocab_size": 4}, {"width": 3, "per_output": 0}]
)
def test_inputs_are_of_one_kind(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Inputs"):
        Inputs(**options)
