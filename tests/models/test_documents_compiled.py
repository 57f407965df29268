"""Documents and padding in one graph of torch.compile: the numbers of a pass that is not compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from architectures import CASES
from golden import assert_same
from memspan.models import LanguageModel
from readings import outcome, some_memory, text

ROWS = 3
LENGTH = 7

STARTS = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
STARTS[0, 4] = STARTS[1, 0] = STARTS[1, 6] = STARTS[2, 5] = True
PADDED = {"lengths": torch.tensor([LENGTH, 5, 0]), "padding": "left"}
WHERE: dict[str, dict[str, Any]] = {
    "starts": {"starts": STARTS},
    "lengths": PADDED,
    "both": {"starts": STARTS} | PADDED,
}

# Tracing warns of what is not ours. One worker imports the compiler.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("compiled")]


def of_one_layer(name: str, dtype: torch.dtype) -> LanguageModel:
    """Tracing takes time for each layer, and they are alike."""
    case = CASES[name]
    backbone = dataclasses.replace(case.backbone, n_layers=1)
    return dataclasses.replace(case, backbone=backbone).model(dtype)


def assert_one_graph(
    model: LanguageModel, where: dict[str, Any], backend: str, tolerance: float
) -> None:
    """Losses, memory and all gradients agree, the initial memory's, too."""
    torch._dynamo.reset()
    with torch.no_grad():
        memory = some_memory(model, ROWS)
    given = (memory, text(ROWS, LENGTH, 5), text(ROWS, LENGTH, 6), where)
    compiled: Any = torch.compile(model, fullgraph=True, backend=backend)
    found = outcome(compiled, *given)
    wanted = outcome(model, *given)
    for name, tensor in found.items():
        assert_same(tensor, wanted[name.replace("_orig_mod.", "")], tolerance, name)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", ["fast-delta", "gated", "feedback"])
def test_documents_compile_as_one_graph(name: str, where: str) -> None:
    assert_one_graph(of_one_layer(name, torch.float64), WHERE[where], "eager", 1e-10)


@pytest.mark.parametrize(
    "name",
    [
        "xl-segment",
        "compressive",
        "fast-sum-attention",
        "fast-delta-elu-attention",
        "fast-outer-product",
    ],
)
def test_documents_and_padding_compile_as_one_graph(name: str) -> None:
    assert_one_graph(of_one_layer(name, torch.float64), WHERE["both"], "eager", 1e-10)


@pytest.mark.parametrize("name", ["gated", "feedback"])
def test_documents_compile_by_inductor(name: str) -> None:
    assert_one_graph(of_one_layer(name, torch.float32), WHERE["both"], "inductor", 1e-5)
