"""Activation checkpointing: the same numbers, with less kept for backward."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from architectures import CASES, VOCABULARY
from memspan.models import LanguageModel
from memspan.models.options import EmbeddingConfig
from memspan.models.registry import MODELS

DROPOUT = ("dropout", "attention_dropout")
STARTS = torch.zeros(3, 7, dtype=torch.bool)
STARTS[0, 0] = STARTS[1, 3] = True
ASKED = {"starts": STARTS}, {"lengths": torch.tensor([7, 5, 7]), "padding": "left"}


def trained(model: LanguageModel, implementation: str | None) -> list[Tensor]:
    """Loss, gradients, memory and random state after two segments that gradients flow through."""
    tokens = torch.randint(VOCABULARY, (2, 3, 7), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(3)
    memory, loss = None, torch.zeros(())
    for segment, more in zip(tokens, ASKED, strict=True):
        options: Any = more
        targets = segment.roll(1, 1)
        output = model(segment, memory, targets=targets, implementation=implementation, **options)
        memory, loss = output.memory, loss + output.loss
    loss.backward()
    assert memory is not None
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients, *memory.tensors().values(), torch.get_rng_state()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_no_number_changes(name: str, dtype: torch.dtype) -> None:
    """Documents and padding inside the segments, dropout, and a memory that gradients flow through."""
    case = CASES[name]
    rates = {name: 0.3 for name in DROPOUT if hasattr(case.backbone, name)}
    case = dataclasses.replace(
        case,
        backbone=dataclasses.replace(case.backbone, **rates),
        embedding=dataclasses.replace(case.embedding, output_dropout=0.2),
    )
    found = []
    for recompute in (False, True):
        torch.manual_seed(1)
        model = case.model(dtype).train()
        model.recompute = recompute
        # The fast paths in one type and the references in the other are enough.
        found.append(trained(model, "reference" if dtype == torch.float64 else None))
    for plain, recomputed in zip(*found, strict=True):
        assert torch.equal(plain, recomputed)


def kept(model: LanguageModel, vocabulary: int, length: int = 24) -> int:
    """Bytes that a forward pass keeps for backward, weights apart."""
    sizes: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return x

    tokens = torch.arange(2 * length).view(2, length) % vocabulary
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        loss = model(tokens, targets=tokens).loss
    del loss
    return sum(sizes.values())


@pytest.mark.parametrize("architecture", MODELS)
def test_less_is_kept(architecture: str) -> None:
    kind = MODELS[architecture]
    names = {field.name for field in dataclasses.fields(kind)}
    wanted = {"n_layers": 3, "d_model": 16, "n_heads": 2, "d_ff": 64, "dropout": 0.1}
    wanted["memory_length"] = 8
    model = LanguageModel(9, kind(**{n: v for n, v in wanted.items() if n in names})).train()
    plain = kept(model, 9)
    model.recompute = True
    assert kept(model, 9) < 0.5 * plain


def test_losses_keep_no_logits() -> None:
    for embedding in (EmbeddingConfig(), EmbeddingConfig(cutoffs=(40, 200), div_val=2)):
        model = LanguageModel(1000, MODELS["lstm"](n_layers=1, d_model=8), embedding)
        plain = kept(model, 1000)
        model.recompute = True
        assert kept(model, 1000) < plain / 5


def test_attention_weights_are_given_once() -> None:
    for name in ("xl-segment", "compressive"):
        model = CASES[name].model().train()
        model.recompute = True
        weights: list[Tensor] = []
        x = torch.zeros(1, 3, 8, dtype=torch.float64, requires_grad=True)
        out = model.backbone(x, implementation="reference", attention_weights=weights)
        out.hidden.sum().backward()
        assert len(weights) == 2
