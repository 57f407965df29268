"""Reports on models that cannot be judged, and the traces that a check leaves."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import small_models
from small_models import Convolved, Gated, State
from statelaws import Claims, Function, Inputs, Recurrent, RefusedError, StatelawsError, check
from statelaws.floor import perturbed
from statelaws.laws import NAMES


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
    """Some outputs are NaN, as for tokens that must never be written."""

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


OF_STATE = {*NAMES} - {
    *("bounded", "long-run", "repeatable", "roll-back", "causality", "gradients")
}


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


def test_laws_beyond_the_budget_are_inconclusive() -> None:
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


def test_the_report_lists_crossed_lengths() -> None:
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


def test_unknown_laws_and_budgets_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no law 'cut': use repeatable, cuts, "):
        check(Gated(), ["cut"])
    with pytest.raises(ValueError, match="budget must be a positive number of seconds, not nan"):
        check(Gated(), budget=float("nan"))


def test_a_model_without_state_says_so() -> None:
    class Forgotten(Gated):
        def mix(self, x: Tensor, state: State) -> tuple[Tensor, State]:
            return super().mix(x, self.start(len(x)))

    class Stateless(Forgotten):
        def mix(self, x: Tensor, state: State) -> tuple[Tensor, State]:
            return super().mix(x, state)[0], state

    class Pointwise(Stateless):
        def step(self, x: Tensor, h: Tensor, t: int) -> Tensor:
            return super().step(x, torch.zeros_like(h), t)

    no_state = "it carries no state: it returns the same after any text"
    for kind, detail in (
        (Forgotten, "the state that was passed has no effect: after it and after an empty one"),
        (Stateless, f"{no_state}, though outputs depend on earlier inputs of the same call"),
        (Pointwise, no_state),
    ):
        report = check(kind(), ["cuts", "bounded"])
        assert {finding.outcome for finding in report.findings} == {"refused"}
        assert not report.tried
        assert report["cuts"].detail.startswith(detail)


def test_fewer_outputs_than_inputs_are_refused() -> None:
    class Strided(Gated):
        def read(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
            y, state = super().read(inputs, state)
            return y[:, ::2], state

    detail = (
        "it returns outputs [3, 12, 11] for 3 rows of 24 steps, and one for each is needed: "
        "Inputs.per_output is of encoders with strides"
    )
    assert {f.detail for f in check(Strided()).findings} == {detail}


def test_a_case_leaves_no_training_mode_to_other_laws() -> None:
    """Batch normalisation raises where training has one row of one token."""
    report = check(small_models.RunningStatistics())
    assert [finding.law for finding in report.broken] == ["replay", "order-of-calls"]
    module = nn.BatchNorm1d(4)
    claims = Claims(moves_in_training=True)

    def read(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y = module((x.cumsum(1) + state[:, None]).mT).mT
        return y, state + x.sum(1)

    report = check(Function(read, lambda n: torch.zeros(n, 4), Inputs(width=4), module, claims))
    assert not report.broken, report
    assert report["order-of-calls"].outcome == "holds"


def test_a_state_whose_rows_are_elsewhere_is_refused() -> None:
    """By chance there are as many layers as rows."""

    def read(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y = state[0][:, None] + x.cumsum(1)
        return y, y[:, -1].expand(3, -1, -1).clone()

    model = Function(read, lambda rows: torch.zeros(3, rows, 4), Inputs(width=4))
    rows = check(model, ["cuts", "rows", "values"])
    assert [f.outcome for f in rows.findings] == ["holds", "refused", "holds"]
    assert (
        "4], whose dimension 0 is not that of rows: give batch_dimension=1 or"
        in rows["rows"].detail
    )
    model = Function(read, lambda rows: torch.zeros(3, rows, 4), Inputs(width=4), batch_dimension=1)
    assert check(model, ["rows"])["rows"].outcome == "holds"

    def kept(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y = torch.stack([part + x[i].cumsum(0) for i, part in enumerate(state[0])])
        return y, (list(y[:, -1]), state[1])

    for other, detail in (
        (None, "with a row more: write an object with a select"),
        (lambda: 0, "its state holds a function: write an object with a select"),
    ):

        def first(n: int, other: Any = other) -> Any:
            return [torch.zeros(4) for _ in range(n)], other

        found = check(Function(kept, first, Inputs(width=4)), ["rows", "values"])
        assert not found.broken
        assert detail in found["rows"].detail


def test_a_difference_of_a_few_floors_is_not_decided() -> None:
    class OtherEpsilon(Gated):
        def step(self, x: Tensor, h: Tensor, t: int) -> Tensor:
            return super().step(x, h, t) * (1 + 1e-6 * (t == 0))

    finding = check(OtherEpsilon(), ["cuts"])["cuts"]
    assert finding.outcome == "inconclusive"
    assert "try float64" in finding.detail
    assert check(OtherEpsilon(torch.float64), ["cuts"]).broken


def test_a_report_says_where_to_look_first() -> None:
    class OverTheBatch(Gated):
        def step(self, x: Tensor, h: Tensor, t: int) -> Tensor:
            return super().step(x, h, t) + h.mean()

    report = check(OverTheBatch())
    assert {f.law for f in report.broken} > {"rows"}
    assert "Look at rows first: the others may follow from it." in str(report)
    assert "It came in training mode, and was checked in evaluation mode." in report.notes


def test_a_model_on_the_meta_device_is_refused() -> None:
    model = Gated()
    model.module.to("meta")
    with pytest.raises(ValueError, match="on the device meta"):
        check(model)


def test_a_function_without_its_module_is_told_of_dropout() -> None:
    def read(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y = nn.functional.dropout(state[:, None] + x.cumsum(1))
        return y, y[:, -1]

    report = check(Function(read, lambda rows: torch.zeros(rows, 4), Inputs(width=4)))
    assert report["repeatable"].outcome == "broken"
    assert "nothing was put into evaluation mode" in str(report)


def test_values_kept_by_a_function_break_bounded() -> None:
    kept = []

    def read(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y = state[:, None] + x.cumsum(1)
        kept.append(y)
        return y, y[:, -1]

    finding = check(Function(read, lambda n: torch.zeros(n, 4), Inputs(width=4)), ["bounded"])[
        "bounded"
    ]
    assert finding.outcome == "broken"
    assert finding.detail.startswith("the model itself keeps 16 bytes a token, beside its state")


def test_a_module_that_contains_itself_is_refused() -> None:
    model: Any = Gated()
    model.module.module = model.module
    with pytest.raises(ValueError, match="let module be a property that returns self"):
        check(model)


@pytest.mark.parametrize("model", [torch.nn.GRU(8, 8), Recurrent])
def test_a_bare_layer_or_a_class_is_refused(model: Any) -> None:
    with pytest.raises(StatelawsError, match=r"make it one by Recurrent\(layer\)"):
        check(model)
