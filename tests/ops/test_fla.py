"""What is handed to fla's kernels and taken from them. The kernels need a GPU and are not tested.

In their place are functions with the signatures of fla 0.5.2 that compute with our reference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from golden import assert_same
from memspan.errors import MemspanError
from memspan.models import GatedDeltaNetConfig
from memspan.ops.fast_weights import fla, reference
from memspan.ops.fast_weights.rules import Chunking, RuleInputs, delta_rule, sum_rule

Call = dict[str, Any]


class Kernels:
    """Both functions of fla, and what they were called with."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def chunk_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        return self.compute(q, k, v, None, beta, **options)

    def chunk_gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        assert g.dtype == torch.float32
        assert g.shape == v.shape[:3]
        return self.compute(q, k, v, g, beta, **options)

    def compute(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        assert q.dtype == k.dtype == v.dtype != torch.float32
        assert q.shape == k.shape
        assert q.shape[:3] == v.shape[:3] == beta.shape
        assert initial_state is not None
        self.calls.append({"q": q, "k": k, "v": v, "state": initial_state})
        q = q * (k.shape[-1] ** -0.5 if scale is None else scale)
        heads = [t.float().transpose(1, 2) for t in (q, k, v, beta)]
        decay = None if g is None else g.transpose(1, 2)
        y, after = reference.run(RuleInputs(*heads, initial_state, None, Chunking(), decay))
        return y.transpose(1, 2).to(v.dtype), after if output_final_state else None


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """The CPU stands for CUDA, and the package is there."""
    found = Kernels()
    for name in ("delta_rule", "gated_delta_rule"):
        module = ModuleType(f"fla.ops.{name}")
        setattr(module, f"chunk_{name}", getattr(found, f"chunk_{name}"))
        monkeypatch.setitem(sys.modules, f"fla.ops.{name}", module)
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(fla, "_installed", lambda: True)
    monkeypatch.setattr(fla, "DEVICE", "cpu")
    return found


def tensors(decay: bool = True, key_heads: int = 2) -> dict[str, Tensor]:
    """Queries, keys and values in bfloat16, the rest in float32, from a memory that is not empty."""
    q, k = torch.randn(2, 3, key_heads, 7, 5).unbind()
    given = {
        "q": q.bfloat16(),
        "k": torch.nn.functional.normalize(k, dim=-1).bfloat16(),
        "v": torch.randn(3, 4, 7, 6).bfloat16(),
        "beta": torch.rand(3, 4, 7),
        "weights": torch.randn(3, 4, 5, 6),
    }
    return given | ({"log_decay": -torch.rand(3, 4, 7)} if decay else {})


@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize("decay", [True, False])
def test_layouts_scale_and_memory(kernels: Kernels, decay: bool, key_heads: int) -> None:
    """Outputs, the memory after and every gradient are those of the reference in float32."""
    given = tensors(decay, key_heads)
    sides = []
    for run in ("fla", "reference"):
        leaves = {name: t.clone().requires_grad_() for name, t in given.items()}
        own = leaves if run == "fla" else {name: t.float() for name, t in leaves.items()}
        y, after = delta_rule(**own, implementation=run)
        assert after.dtype == torch.float32
        total = y.float().sin().sum() + after.sin().sum()
        sides.append([y, after, *torch.autograd.grad(total, list(leaves.values()))])
    assert sides[0][0].dtype == torch.bfloat16
    for name, a, b in zip(("y", "weights", *given), *sides, strict=True):
        # Our rounding of an output is all that differs.
        assert_same(a.float(), b.float(), 2e-2, name)
    assert_same(sides[0][1], sides[1][1], 1e-6, "memory")
    (call,) = kernels.calls
    # By token, then by head; nothing was converted.
    assert call["q"].shape == (3, 7, 4, 5)
    assert call["v"].shape == (3, 7, 4, 6)
    assert call["q"].dtype == call["k"].dtype == call["v"].dtype == torch.bfloat16
    assert call["state"].dtype == torch.float32


def test_it_is_never_chosen_by_itself(kernels: Kernels) -> None:
    """Nobody has measured it."""
    delta_rule(**tensors(), implementation="fla")
    given = {name: t.float() for name, t in tensors().items()}
    delta_rule(**given)
    assert len(kernels.calls) == 1


def to_float32(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.float() for name, t in given.items()}


def with_wide_keys(given: dict[str, Tensor]) -> dict[str, Tensor]:
    wide = {name: given[name].repeat(1, 1, 1, 64) for name in ("q", "k")}
    return given | wide | {"weights": torch.zeros(3, 4, 320, 6)}


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("in bfloat16 with a memory in float32: choose precision bfloat16", to_float32),
        ("memory in float32", lambda given: given | {"weights": given["weights"].bfloat16()}),
        ("at most 256 features", with_wide_keys),
    ],
)
@pytest.mark.usefixtures("kernels")
def test_what_it_does_not_take(
    message: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    with pytest.raises(MemspanError, match=message):
        delta_rule(**change(tensors()), implementation="fla")


def test_where_it_cannot_run(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors(decay=False, key_heads=4)
    with pytest.raises(MemspanError, match="fla implementation has no sum rule: use chunked"):
        sum_rule(**{n: t for n, t in given.items() if n != "beta"}, implementation="fla")
    monkeypatch.setattr(fla, "_installed", lambda: False)
    with pytest.raises(MemspanError, match="needs flash-linear-attention: install it"):
        delta_rule(**given, implementation="fla")
    monkeypatch.setattr(fla, "DEVICE", "cuda")
    with pytest.raises(MemspanError, match="needs CUDA: use compiled or chunked"):
        delta_rule(**given, implementation="fla")


def test_a_model_hands_over_what_autocast_computed(kernels: Kernels) -> None:
    """Products in bfloat16 are not converted; the memory is float32; results are near float32's."""
    config = GatedDeltaNetConfig(
        n_layers=2, d_model=16, n_heads=2, n_value_heads=4, d_value=4, d_ff=8
    )
    backbone = config.build()
    x = torch.randn(2, 9, 16)
    before = backbone(x).memory.detach()
    expected = backbone(x, before)
    with torch.autocast("cpu", torch.bfloat16):
        found = backbone(x, before, implementation="fla")
    assert len(kernels.calls) == 2
    assert {t.dtype for t in (kernels.calls[0][n] for n in "qkv")} == {torch.bfloat16}
    assert {t.dtype for t in found.memory.tensors().values()} == {torch.float32, torch.int64}
    assert_same(found.hidden.float(), expected.hidden, 0.1, "hidden")
    assert_same(found.memory.weights, expected.memory.weights, 0.1, "weights")
    found.hidden.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in backbone.parameters())
    with pytest.raises(MemspanError, match="choose precision bfloat16"):
        backbone(x, before, implementation="fla")
