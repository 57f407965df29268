"""Whole models under PyTorch's autocast, torch.compile and devices that are not here."""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from architectures import CASES, Case
from golden import assert_same
from memspan import nn
from memspan.lab.evaluation import sum_of
from memspan.lab.training.state import non_finite_rows
from memspan.models import LanguageModel
from memspan.models.registry import MODELS
from readings import assert_memories_equal, every_case, fields, read, text


@every_case
def test_gradients_under_bfloat16_autocast(case: Case) -> None:
    """Training and reading with bfloat16 products, memory carried: near float32's numbers."""
    model = case.model(torch.float32)
    expected, memory = read(model, text(2, 6), [4, 2])
    with torch.autocast("cpu", torch.bfloat16):
        logits, rough = read(model, text(2, 6), [4, 2])
        out = model(text(2, 6), rough.detach(), targets=text(2, 6, 1))
        (out.losses.float().sum() + out.auxiliary_loss).backward()
        reader = model.reader(batch_size=2)
        read_logits = torch.cat([reader.read(s) for s in text(2, 6).split([4, 2], 1)], 1)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert_same(logits, expected, 0.15, "logits")
    assert_same(read_logits, expected, 0.15, "reader's logits")
    for name, tensor in fields(rough).items():
        assert tensor.dtype == fields(memory)[name].dtype
        assert_same(tensor, fields(memory)[name], 0.15, name)
    # And on without it.
    model(text(2, 3), rough)
    model(text(2, 3), reader.memory)


COMPILED = {
    "xl-segment": True,
    "xl-fixed-learned": False,
    "compressive": True,
    "compressive-max-learned": False,
    "fast-delta": True,
    "fast-sum-attention": False,
    "gated": True,
    "infini": True,
    "rmt": True,
    "rmt-associative": True,
    "feedback": True,
}
"""Cases that are compiled as one graph, and whether with gradients."""


# Tracing warns of what is not ours.
@pytest.mark.filterwarnings("ignore")
# One worker imports the compiler.
@pytest.mark.xdist_group("compiled")
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_as_one_graph(name: str) -> None:
    """The same numbers: three segments, and what flows back from the last."""
    if torch.__version__.startswith("2.10.") and name.startswith(("fast", "feedback")):
        pytest.skip("torch 2.10 cannot trace how they look at their modules")
    # Tracing takes time for each layer, and they are alike.
    case = CASES[name]
    backbone = dataclasses.replace(case.backbone, n_layers=1)
    model = dataclasses.replace(case, backbone=backbone).model()
    gradient = COMPILED[name]
    torch._dynamo.reset()

    def run(model: Any) -> tuple[list[Any], list[Tensor]]:
        memory = model_memory
        outputs = []
        for n in range(3):
            outputs.append(model(text(2, 4, n), memory))
            memory = outputs[-1].memory
        if not gradient:
            return outputs, []
        loss = outputs[-1].logits.sum() + outputs[-1].auxiliary_loss
        return outputs, list(torch.autograd.grad(loss, parameters))

    # Without gradients from a memory, which is one graph; with them also from none, which is another.
    model_memory = None if gradient else model.initial_memory(2)
    parameters = list(model.parameters())
    with torch.set_grad_enabled(gradient):
        outputs, grads = run(torch.compile(model, fullgraph=True, backend="eager"))
        expected, expected_grads = run(model)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert_same(ours.logits, theirs.logits, 1e-9, "logits")
        assert_memories_equal(ours.memory, theirs.memory, 1e-9)
    for grad, theirs in zip(grads, expected_grads, strict=True):
        assert_same(grad, theirs, 1e-9, "gradient")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.xdist_group("compiled")
def test_compiles_with_all_sizes_symbolic() -> None:
    """``dynamic=True``, as for batches and segments of changing sizes: a memory is still known."""
    case = CASES["gla-retention"]
    backbone = dataclasses.replace(case.backbone, n_layers=1)
    model = dataclasses.replace(case, backbone=backbone).model()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    with torch.no_grad():
        for rows, length in ((3, 4), (2, 5)):
            memory = model(text(rows, 3)).memory
            ours = compiled(text(rows, length), memory)
            theirs = model(text(rows, length), memory)
            assert_same(ours.logits, theirs.logits, 1e-9, "logits")
            assert_memories_equal(ours.memory, theirs.memory, 1e-9)


@pytest.mark.parametrize("name", CASES)
def test_a_pass_waits_for_no_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two segments and back, on tensors without numbers: whoever looks at one fails."""
    # Autocast does not know that device.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    # Tensors without numbers take as long for each layer, and layers are alike.
    case = CASES[name]
    case = dataclasses.replace(case, backbone=dataclasses.replace(case.backbone, n_layers=1))
    backbone = case.model().backbone.to("meta").train()
    x = torch.randn(2, 4, backbone.config.d_model, dtype=torch.float64, device="meta")
    out = backbone(x.requires_grad_(), backbone(x).memory)
    (out.hidden.sum() + out.auxiliary_loss).backward()
    assert x.grad is not None


# ----- Apple's Metal (mps) has no float64, so none may be made there. The CPU stands for it. Two
# functions need float64: they move to the CPU first, and nothing else may.


ON_THE_CPU = {"sinusoids", "sum_of"}
"""Functions that compute in float64, on the CPU."""


class NoFloat64(TorchDispatchMode):
    """Refuses float64 outside those functions, and within them before something is moved."""

    moved = False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in tree_leaves(found)):
            callers = {frame.name for frame in traceback.extract_stack()}
            assert callers & ON_THE_CPU, func
            assert self.moved, func
        return found


@pytest.fixture
def _no_float64(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(nn, "NO_FLOAT64", ("cpu",))
    mode = NoFloat64()
    to_cpu = Tensor.cpu

    def cpu(x: Tensor) -> Tensor:
        mode.moved = True
        return to_cpu(x)

    monkeypatch.setattr(Tensor, "cpu", cpu)
    with mode:
        yield


@pytest.mark.usefixtures("_no_float64")
@pytest.mark.parametrize("architecture", MODELS)
def test_a_training_step_without_float64(architecture: str) -> None:
    more = {"positions": "sinusoidal"} if architecture == "fast-weights" else {}
    options = MODELS[architecture](n_layers=1, d_model=8, **more)
    model = LanguageModel(11, options)
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    output = model(tokens, targets=tokens)
    output = model(tokens, output.memory.detach(), targets=tokens)
    output.loss.backward()
    assert non_finite_rows(output.memory) is None


@pytest.mark.usefixtures("_no_float64")
def test_sums_without_float64() -> None:
    """Health adds up in float32: that overflow says only that each element is to be looked at."""
    assert sum_of(torch.ones(2, 6), torch.zeros(2, 6, dtype=torch.int64)) == 12
    memory = LanguageModel(11, MODELS["transformer-xl"]()).initial_memory(2)
    memory = memory.map(lambda t: torch.full_like(t, 3e38) if t.is_floating_point() else t)
    assert non_finite_rows(memory) is None
    with pytest.raises(AssertionError):
        torch.zeros(2).double()
