"""What ``torch.func`` does with a model leaves it what it was, tied embeddings included."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, stack_module_state, vmap

from architectures import ADAPTIVE, CASES, ONE_OF_EACH, UNTIED, Case, randomise, transformer_xl
from golden import assert_same
from memspan.models import EmbeddingConfig, LanguageModel
from memspan.models.embedding import tied_names
from readings import every_case, text

Parameters = dict[str, Tensor]
LENGTH = 4
EMBEDDINGS = {
    "tied": EmbeddingConfig(),
    "untied": UNTIED,
    "adaptive": ADAPTIVE,
    "adaptive-all": dataclasses.replace(ADAPTIVE, tie_projections="all"),
    "projected": EmbeddingConfig(d_embed=6, tie_projections="all"),
}


@contextmanager
def unharmed(model: LanguageModel) -> Iterator[None]:
    """Afterwards the model is what it was, and its optimiser trains all that it trained before."""
    twin, parameters, ties = copy.deepcopy(model), list(model.parameters()), tied_names(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    yield
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert tied_names(model) == ties
    for each, optimizer in zip((model, twin), optimizers, strict=True):
        memory = each(text(2, 6)).memory
        each(text(2, 6, 2), memory, targets=text(2, 6, 3)).loss.backward()
        optimizer.step()
    for name, expected in twin.named_parameters():
        found = model.get_parameter(name)
        assert (found.grad is None) == (expected.grad is None), name
        assert torch.equal(found, expected), name
    assert model.embedding.tables[0].grad.any()


@pytest.mark.parametrize("embedding", EMBEDDINGS.values(), ids=EMBEDDINGS)
def test_stateless_calls(embedding: EmbeddingConfig) -> None:
    """With all parameters, and with one name for all that are tied."""
    model, other = (randomise(transformer_xl(embedding).model(), seed) for seed in (0, 1))
    own = model(text(2, LENGTH)).logits.detach()
    with unharmed(model):
        found = functional_call(model, dict(other.named_parameters()), (text(2, LENGTH),))
        assert_same(found.logits, other(text(2, LENGTH)).logits, 1e-12, "logits")
        for names in tied_names(model):
            value = 2 * model.get_parameter(names[0]).detach()
            first, *others = (
                functional_call(model, {name: value}, (text(2, LENGTH),)).logits for name in names
            )
            assert all(torch.equal(first, logits) for logits in others), names
            assert not torch.equal(first, own), names


def row_loss(
    model: LanguageModel, parameters: Parameters, tokens: Tensor, targets: Tensor
) -> Tensor:
    """Of one row, ``[T]``, as a function of the parameters."""
    options = {"targets": targets[None], "implementation": "reference"}
    return functional_call(model, parameters, (tokens[None],), options).losses.sum()


@every_case
def test_gradients_per_sample(case: Case) -> None:
    """Of every row's loss, all at once. Without clusters, whose indexing vmap does not know."""
    model = dataclasses.replace(case, embedding=EMBEDDINGS["projected"]).model()
    tokens, targets = text(3, LENGTH), text(3, LENGTH, 1)
    parameters = dict(model.named_parameters())
    losses = model(tokens, targets=targets).losses.sum(1)
    rows = [
        torch.autograd.grad(loss, parameters.values(), retain_graph=True, materialize_grads=True)
        for loss in losses
    ]
    with unharmed(model):
        by_row = vmap(grad(partial(row_loss, model)), in_dims=(None, 0, 0))
        found = by_row(parameters, tokens, targets)
    for (name, gradients), *expected in zip(found.items(), *rows, strict=True):
        assert_same(gradients, torch.stack(expected), 1e-9, name)


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_several_models_at_once(name: str) -> None:
    """torch's recipe for ensembles, on a model without values."""
    models = [randomise(CASES[name].model(), seed) for seed in (0, 1)]
    shell, tokens = copy.deepcopy(models[0]).to("meta"), text(2, LENGTH)

    def logits(*state: Parameters) -> Tensor:
        options = {"implementation": "reference"}
        return functional_call(shell, state, (tokens,), options).logits

    expected = torch.stack([model(tokens).logits for model in models])
    with unharmed(models[0]), unharmed(models[1]):
        found = vmap(logits)(*stack_module_state(models))
    assert_same(found, expected, 1e-9, "logits")
