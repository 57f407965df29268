"""What a report says of models that cannot be judged, and what a check leaves behind."""

from __future__ import annotations

import json
import time
from collections.abc import Collection

import pytest
import small_models
import torch
from small_models import Convolved, Gated, State
from torch import Tensor, nn

from memspan.stateful.check import NAMES, check
from memspan.stateful.floor import perturbed
from memspan.stateful.protocol import Claims, RefusedError


def test_a_model_is_afterwards_as_it_was() -> None:
    model = small_models.RunningStatistics()
    model.module.train()
    model.module["head"].eval()
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    modes = [module.training for module in model.module.modules()]
    random = torch.get_rng_state()
    check(model)
    assert all(torch.equal(v, before[name]) for name, v in model.module.state_dict().items())
    assert [module.training for module in model.module.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert all(weight.grad is None for weight in model.module.parameters())


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_perturbed_weights_are_their_neighbours(dtype: torch.dtype) -> None:
    values = [1.0, -1.0, 1.5, 0.0, -0.0, torch.inf, -torch.inf, torch.finfo(dtype).max, -1e-3]
    module = nn.Module()
    module.weight = nn.Parameter(torch.tensor(values, dtype=dtype))
    before = module.weight.detach().clone()
    seen: list[set[float]] = [set() for _ in values]
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        with perturbed(module, generator):
            for each, value in zip(seen, module.weight.tolist(), strict=True):
                each.add(value)
    assert torch.equal(module.weight.view(torch.uint8), before.view(torch.uint8))
    eps = torch.finfo(dtype).eps
    assert seen[0] == {1 + eps, 1 - eps / 2}
    assert seen[1] == {-1 - eps, eps / 2 - 1}
    assert seen[2] == {1.5 + eps, 1.5 - eps}
    assert all(0 < abs(value) < torch.finfo(dtype).tiny for value in seen[3] | seen[4])
    assert seen[5:8] == [{torch.inf}, {-torch.inf}, {torch.finfo(dtype).max}]


class SinglePrecisionInside(Convolved):
    """In float64, it computes its recurrence in float32, and after a cut in another order."""

    def mix(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, after = super().mix(x.float().to(x), state)
        y = y.float()
        whole = y.sum(2, keepdim=True)
        halves = y[..., ::2].sum(2, keepdim=True) + y[..., 1::2].sum(2, keepdim=True)
        return (y + (halves if x.shape[1] % 2 else whole)).to(x), after


def test_float64_counts_only_where_all_is_float64() -> None:
    finding = check(SinglePrecisionInside(torch.float64), ["cuts"])["cuts"]
    assert finding.outcome == "holds"
    assert finding.difference is not None
    assert finding.difference > 1e-9
    # And where it is, a difference of that size is an error.
    assert check(small_models.SavedInHalfPrecision(torch.float64), ["files"]).broken


class Forgetful(Gated):
    """Its state hardly matters, so that nothing can be said of it."""

    def step(self, x: Tensor, h: Tensor, t: int) -> Tensor:
        return super().step(x, 1e-6 * h, t)


class Constant(Gated):
    def read(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        return torch.ones(*inputs.shape, 3), state


class DetachedAtEveryToken(Gated):
    """Not broken: a long call has no other gradients."""

    def step(self, x: Tensor, h: Tensor, t: int) -> Tensor:
        return super().step(x, h.detach(), t)


class PartlyNaN(Gated):
    """As of tokens that are never to be written."""

    def read(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        outputs, state = super().read(inputs, state)
        outputs = outputs * torch.ones(outputs.shape[2]).index_fill(0, torch.tensor(3), torch.nan)
        outputs[..., 4] = -torch.inf
        return outputs, state


class Integers(Gated):
    def read(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        outputs, state = super().read(inputs, state)
        return outputs.argmax(-1), state


class Unable(Gated):
    def read(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        raise RefusedError("it needs a GPU\nand says so")


class ShortSegmentsRaise(Convolved):
    def window(self, before: Tensor, x: Tensor) -> Tensor:
        if x.shape[1] == 2:
            raise IndexError("too short")
        return super().window(before, x)


OF_STATE = {*NAMES} - {"bounded", "repeatable", "roll-back", "causality", "gradients"}


@pytest.mark.parametrize(
    ("kind", "laws", "outcome", "detail"),
    [
        (Forgetful, OF_STATE, "inconclusive", ""),
        (Constant, OF_STATE, "inconclusive", "outputs are all the same, or not finite"),
        (Constant, ["gradients"], "refused", "its outputs carry no gradients"),
        (DetachedAtEveryToken, ["gradients"], "inconclusive", "hardly any gradient flows"),
        (
            small_models.StateDroppedAtASecondSegmentOfManyTokens,
            ["gradients"],
            "inconclusive",
            "outputs depend on where the text is cut (3 rows",
        ),
        (PartlyNaN, ["cuts", "rows", "values"], "holds", ""),
        (ShortSegmentsRaise, ["cuts"], "refused", "IndexError: too short (3 rows of "),
        (Integers, None, "refused", "read does not return a pair of floating-point outputs and"),
        (Unable, None, "refused", "it needs a GPU and says so"),
    ],
)
def test_a_law_that_cannot_be_tried_says_why(
    kind: type[Gated], laws: Collection[str] | None, outcome: str, detail: str
) -> None:
    findings = check(kind(), laws).findings
    assert len(findings) == len(laws or NAMES)
    assert {finding.outcome for finding in findings} == {outcome}
    assert all(finding.detail.startswith(detail) for finding in findings)


class Slow(Gated):
    def read(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        end = time.process_time() + 0.01
        while time.process_time() < end:
            pass
        return super().read(inputs, state)


def test_what_is_not_reached_in_the_time_is_inconclusive() -> None:
    started = time.process_time()
    report = check(Slow(), budget=0.5)
    assert time.process_time() - started < 3
    assert not report.broken
    late = [f for f in report.findings if f.outcome == "inconclusive"]
    assert len(late) > 5
    assert all("time" in finding.detail for finding in late)


class Long(Gated):
    """It has a table of 40 positions, and a window."""

    claims = Claims(lengths={"window": 5, "table": 40})

    def read(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        if inputs.shape[1] > 40:
            raise IndexError("beyond the table")
        return super().read(inputs, state)


def test_the_report_lists_what_was_crossed() -> None:
    report = check(Long(), ["cuts", "rows"])
    assert not report.broken
    assert [finding.outcome for finding in report.findings] == ["holds", "holds"]
    assert report.crossed == {"window": (5, 4), "table": (40, 0)}
    assert "Crossed: window of 5, 4 times; table of 40, never." in str(report)


def test_a_report_is_a_table_and_json() -> None:
    report = check(
        small_models.StateDroppedAtASecondSegmentOfManyTokens(), ["cuts", "roll-back"], seed=4
    )
    assert [finding.law for finding in report.broken] == ["cuts"]
    lines = str(report).splitlines()
    assert lines[1].startswith("cuts           broken")
    assert lines[1].endswith("1 row of 1 + 2 tokens")
    assert max(map(len, lines)) <= 100
    content = json.loads(report.to_json())
    assert content["seed"] == 4
    assert content["dtype"] == "float32"
    assert content["versions"]["torch"] == torch.__version__
    assert content["findings"][0]["script"] == report["cuts"].script


def test_mistakes_are_told() -> None:
    with pytest.raises(ValueError, match="there is no law 'cut': use repeatable, cuts, "):
        check(Gated(), ["cut"])
    with pytest.raises(ValueError, match="budget must be a positive number of seconds, not nan"):
        check(Gated(), budget=float("nan"))
