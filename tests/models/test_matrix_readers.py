"""Readers of stacks with matrix memories: single tokens by the step in C."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from golden import assert_same
from memspan.models.matrix.reader import MatrixReader
from memspan.models.registry import MODELS
from memspan.ops.delta_rules import compiled

CASES: list[tuple[str, dict[str, Any]]] = [
    ("gated-delta-net", {"n_value_heads": 4, "d_value": 12}),
    ("kda", {"negative_eigenvalues": True, "d_value": 20, "activation": "gelu"}),
    ("gated-delta-net-2", {"d_value": 20}),
    ("delta-product", {}),
    ("delta-product", {"decay": False, "n_householder": 3}),
    ("gla", {}),
    ("gla", {"decay": "retention"}),
    ("mamba-2", {}),
    ("mamba-2", {"n_groups": 2, "d_ff": 24, "convolution": 1}),
]


@pytest.mark.skipif(not compiled.available(torch.zeros(())), reason="no loops in C")
@pytest.mark.parametrize(("name", "options"), CASES)
def test_single_tokens_in_C_equal_the_pass(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    sizes = {"n_layers": 2, "d_model": 32, "n_heads": 2}
    if name != "mamba-2":
        sizes["d_ff"] = 48
    backbone = MODELS[name](**sizes | options).build().double().eval()
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        x = torch.randn(3, 12, 32, dtype=torch.float64)
        whole = backbone(x, implementation="reference")
    reader = backbone.reader(None, 3)
    assert isinstance(reader, MatrixReader)
    outputs = [reader.read(x[:, :4]), *(reader.step(x[:, t])[:, None] for t in range(4, 11))]
    assert reader._step is not None
    outputs.append(reader.read(x[:, 11:]))
    assert_same(torch.cat(outputs, 1), whole.hidden, 1e-11, "outputs")
    for field, ours in reader.memory.tensors().items():
        assert_same(ours, whole.memory.tensors()[field], 1e-11, field)


def test_more_writes_than_the_step_in_C_has_take_a_pass() -> None:
    config = MODELS["delta-product"](
        n_layers=1, d_model=8, n_heads=2, d_ff=8, **{"n_householder": 33}
    )
    backbone = config.build().eval()
    x = torch.randn(1, 1, 8)
    reader = backbone.reader(None, 1)
    assert isinstance(reader, MatrixReader)
    assert_same(reader.read(x), backbone(x).hidden, 1e-5, "outputs")
    assert reader._step is None
