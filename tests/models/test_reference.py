"""Every implementation against ``implementation="reference"``, which is plain autograd: what needs more
than one backward works with it. And activation checkpointing: the same numbers, with less kept."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from architectures import CASES, Case, implementations
from memspan.errors import MemspanError
from memspan.models import LanguageModel
from memspan.models.options import EmbeddingConfig
from memspan.models.registry import MODELS
from readings import every_case, outcome, some_memory, text
from tiny_runs import model_of


@every_case
def test_every_implementation_is_the_reference(case: Case) -> None:
    """Losses, memory and the gradients of every parameter and of the memory before; rows of different
    ages."""
    model = case.model()
    given = model, some_memory(model, 3), text(3, 9), text(3, 9, 1)
    expected = outcome(*given, {"implementation": "reference"})
    for implementation in (None, *implementations(model.backbone)):
        for name, found in outcome(*given, {"implementation": implementation}).items():
            # A gradient may be a sum of which rounding is all that is left.
            scale = max(1.0, float(expected[name].abs().max())) if found.numel() else 1.0
            torch.testing.assert_close(
                found,
                expected[name],
                rtol=0,
                atol=1e-9 * scale,
                msg=lambda why, at=(implementation, name): f"{at}: {why}",
            )
    with pytest.raises(MemspanError, match="no implementation 'quick': use "):
        model(text(1, 2), implementation="quick")


@every_case
def test_double_backward(case: Case) -> None:
    """The derivative of a squared gradient, along some direction, is the numeric one."""
    backbone = case.model().backbone
    memory = backbone.initial_memory(1)
    x = torch.randn(1, 2, backbone.config.d_model, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)

    def run(x: Tensor) -> Tensor:
        return (backbone(x, memory, implementation="reference").hidden * weight).sum()

    assert torch.autograd.gradgradcheck(run, (x,), fast_mode=True)


# ----- Recomputation


STARTS = torch.zeros(3, 7, dtype=torch.bool)
STARTS[0, 0] = STARTS[1, 3] = True
# Documents inside the first segment, padding inside the second.
ASKED: tuple[dict[str, Any], ...] = (
    {"starts": STARTS},
    {"lengths": torch.tensor([7, 5, 7]), "padding": "left"},
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@every_case
def test_no_number_changes(case: Case, dtype: torch.dtype) -> None:
    """With dropout, and a memory that gradients flow into; nor do later draws."""
    rates = {name: 0.3 for name in ("dropout", "attention_dropout") if hasattr(case.backbone, name)}
    backbone = dataclasses.replace(case.backbone, **rates)
    embedding = dataclasses.replace(case.embedding, output_dropout=0.2)
    model = dataclasses.replace(case, backbone=backbone, embedding=embedding).model(dtype)
    memory = some_memory(model, 3)
    found = []
    # Random features are drawn anew in training, and stay.
    state = copy.deepcopy(model.state_dict())
    model.train()
    for recompute in (False, True):
        model.recompute = recompute
        model.load_state_dict(state)
        torch.manual_seed(3)
        # The fast paths in one type and the references in the other are enough.
        usual = {"implementation": "reference" if dtype == torch.float64 else None}
        asked = [usual | options for options in ASKED]
        results = outcome(model, memory, text(3, 14), text(3, 14, 1), *asked)
        found.append(results | {"random state": torch.get_rng_state()})
    for name, expected in found[0].items():
        assert torch.equal(found[1][name], expected), name


def less_is_kept(model: LanguageModel, length: int = 24) -> float:
    """Bytes kept for backward, weights apart, as a share of those without recomputation."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    tokens = torch.arange(2 * length).view(2, length) % model.vocab_size
    found = []
    for recompute in (False, True):
        model.recompute = recompute
        sizes: dict[int, int] = {}

        def note(x: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in weights:
                sizes[storage.data_ptr()] = storage.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            loss = model(tokens, targets=tokens).loss
        del loss
        found.append(sum(sizes.values()))
    return found[1] / found[0]


@pytest.mark.parametrize("architecture", MODELS)
def test_less_is_kept(architecture: str) -> None:
    sizes = {"n_layers": 3, "d_model": 16, "n_heads": 2, "d_ff": 64, "memory_length": 8}
    config = dataclasses.replace(model_of(architecture, **sizes), dropout=0.1)
    assert less_is_kept(LanguageModel(9, config).train()) < 0.5


@pytest.mark.parametrize("options", [{}, {"cutoffs": (40, 200), "div_val": 2}], ids=str)
def test_losses_keep_no_logits(options: dict[str, Any]) -> None:
    config = MODELS["lstm"](n_layers=1, d_model=8)
    assert less_is_kept(LanguageModel(1000, config, EmbeddingConfig(**options))) < 1 / 5


@pytest.mark.parametrize("name", ["xl-segment", "compressive"])
def test_attention_weights_are_given_once(name: str) -> None:
    model = CASES[name].model().train()
    model.recompute = True
    weights: list[Tensor] = []
    x = torch.zeros(1, 3, 8, dtype=torch.float64, requires_grad=True)
    out = model.backbone(x, implementation="reference", attention_weights=weights)
    out.hidden.sum().backward()
    assert len(weights) == 2
