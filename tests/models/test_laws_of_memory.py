"""Language models and backbones as models that carry state."""

from __future__ import annotations

import pytest
import torch

from architectures import CASES
from memspan.lab.carries_memory import CarriesMemory
from statelaws import RefusedError, check


@pytest.mark.parametrize(("part", "dtype"), [("model", torch.int64), ("backbone", torch.float64)])
def test_inputs_and_copies(part: str, dtype: torch.dtype) -> None:
    """Vectors are of the model's own type, and copies of no graph."""
    whole = CASES["feedback"].shared_model()
    model = CarriesMemory(whole if part == "model" else whole.backbone)
    x = model.inputs.draw(2, 6, torch.Generator().manual_seed(0))
    assert x.dtype == dtype
    _, state = model.read(x, model.start(2))
    assert not any(t.requires_grad for t in model.copy(state).tensors().values())


@pytest.mark.parametrize(
    ("name", "part"),
    [("compressive", "model"), ("feedback", "backbone"), ("gated", "model"), ("lstm", "backbone")],
)
def test_all_laws_hold(name: str, part: str) -> None:
    # Layers are alike.
    model = CASES[name].with_options(n_layers=1).model(torch.float32)
    report = check(CarriesMemory(model if part == "model" else model.backbone), budget=300)
    others = {f.law for f in report.findings if f.outcome != "holds"}
    assert not report.broken, report
    by_design = set() if model.backbone.cut_invariant() else {"cuts", "gradients", "long-run"}
    assert others == {"roll-back", "replay", *by_design}, report


def test_a_model_without_memory_is_refused() -> None:
    report = check(CarriesMemory(CASES["transformer"].model()), ["values"])
    (finding,) = report.findings
    assert finding.outcome == "refused"
    assert finding.detail.startswith("it carries no state")


def test_a_refusal_quotes_the_model() -> None:
    model = CarriesMemory(CASES["lstm"].shared_model())
    with pytest.raises(RefusedError, match="vocab"):
        model.read(torch.tensor([[11]]), model.start(1))
