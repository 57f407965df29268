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

from architectures import ADAPTIVE, CASES, UNTIED, Case, randomise
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
ARCHITECTURES = ("xl-segment", "compressive", "feedback", "fast-delta", "lstm", "transformer")


def with_embeddings(*embeddings: str) -> pytest.MarkDecorator:
    """Every architecture with each of these embeddings."""
    cases = {
        f"{name}-{kind}": dataclasses.replace(CASES[name], embedding=EMBEDDINGS[kind])
        for name in ARCHITECTURES
        for kind in embeddings
    }
    return pytest.mark.parametrize("case", cases.values(), ids=cases)


def row_loss(
    model: LanguageModel, parameters: Parameters, tokens: Tensor, targets: Tensor
) -> Tensor:
    """Of one row, ``[T]``, as a function of the parameters."""
    options = {"targets": targets[None], "implementation": "reference"}
    return functional_call(model, parameters, (tokens[None],), options).losses.sum()


def update(model: LanguageModel, optimizer: torch.optim.Optimizer) -> None:
    memory = model(text(2, 6), targets=text(2, 6, 1)).memory
    out = model(text(2, 6, 2), memory, targets=text(2, 6, 3))
    (out.losses.sum() + out.auxiliary_loss).backward()
    optimizer.step()


@contextmanager
def unharmed(model: LanguageModel) -> Iterator[None]:
    """Afterwards the model is what it was, and its optimiser trains all that it trained before."""
    twin, parameters, ties = copy.deepcopy(model), list(model.parameters()), tied_names(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    yield
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert tied_names(model) == ties
    for name, tensor in twin.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert torch.equal(model(text(2, LENGTH)).logits, twin(text(2, LENGTH)).logits)
    for each, optimizer in zip((model, twin), optimizers, strict=True):
        update(each, optimizer)
    for name, expected in twin.named_parameters():
        found = model.get_parameter(name)
        assert (found.grad is None) == (expected.grad is None), name
        assert torch.equal(found, expected), name
    assert model.embedding.tables[0].grad.any()


@with_embeddings(*EMBEDDINGS)
def test_stateless_calls(case: Case) -> None:
    model, other = case.model(), randomise(case.model(), seed=1)
    with unharmed(model):
        found = functional_call(model, dict(other.named_parameters()), (text(2, LENGTH),))
        assert_same(found.logits, other(text(2, LENGTH)).logits, 1e-12, "logits")


@with_embeddings("tied", "adaptive", "adaptive-all", "projected")
def test_one_name_stands_for_all_that_are_tied(case: Case) -> None:
    model = case.model()
    own = model(text(2, LENGTH)).logits.detach()
    with unharmed(model):
        for names in tied_names(model):
            value = 2 * model.get_parameter(names[0]).detach()
            first, *others = (
                functional_call(model, {name: value}, (text(2, LENGTH),)).logits for name in names
            )
            assert all(torch.equal(first, logits) for logits in others), names
            assert not torch.equal(first, own), names


@with_embeddings(*EMBEDDINGS)
def test_gradients_of_gradients(case: Case) -> None:
    model, tokens, targets = case.model(), text(1, LENGTH)[0], text(1, LENGTH, 1)[0]
    own = dict(model.named_parameters())

    def slope(parameters: Parameters) -> Tensor:
        """The squared norm of the gradient."""
        gradient = grad(lambda given: row_loss(model, given, tokens, targets))(parameters)
        return torch.stack([each.square().sum() for each in gradient.values()]).sum()

    total = row_loss(model, own, tokens, targets)
    first = torch.autograd.grad(total, own.values(), create_graph=True, materialize_grads=True)
    squares = torch.stack([each.square().sum() for each in first]).sum()
    expected = torch.autograd.grad(squares, own.values(), materialize_grads=True)
    with unharmed(model):
        found = grad(slope)({name: p.detach() for name, p in own.items()})
    for (name, ours), wanted in zip(found.items(), expected, strict=True):
        assert_same(ours, wanted, 1e-9, name)


@every_case
@pytest.mark.parametrize("embedding", ["tied", "untied", "projected"])
def test_gradients_per_sample(case: Case, embedding: str) -> None:
    """Of every row's loss, all at once. Without clusters, whose indexing vmap does not know."""
    model = dataclasses.replace(case, embedding=EMBEDDINGS[embedding]).model()
    tokens, targets = text(3, LENGTH), text(3, LENGTH, 1)
    parameters = dict(model.named_parameters())
    rows = [
        torch.autograd.grad(
            model(tokens[[row]], targets=targets[[row]]).losses.sum(),
            parameters.values(),
            materialize_grads=True,
        )
        for row in range(3)
    ]
    with unharmed(model):
        found = vmap(grad(partial(row_loss, model)), in_dims=(None, 0, 0))(
            parameters, tokens, targets
        )
    for (name, gradients), *expected in zip(found.items(), *rows, strict=True):
        assert_same(gradients, torch.stack(expected), 1e-9, name)


@with_embeddings("tied", "untied", "projected")
def test_several_models_at_once(case: Case) -> None:
    """torch's recipe for ensembles, on a model without values."""
    models = [case.model(), randomise(case.model(), seed=1)]
    shell, tokens = copy.deepcopy(models[0]).to("meta"), text(2, LENGTH)

    def logits(*state: Parameters) -> Tensor:
        options = {"implementation": "reference"}
        return functional_call(shell, state, (tokens,), options).logits

    expected = torch.stack([model(tokens).logits for model in models])
    with unharmed(models[0]), unharmed(models[1]):
        found = vmap(logits)(*stack_module_state(models))
    assert_same(found, expected, 1e-9, "logits")
