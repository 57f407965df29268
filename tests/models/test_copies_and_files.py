"""Models and memories as things to be copied and stored, and models as functions, by ``torch.func``."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from architectures import ADAPTIVE, CASES, ONE_OF_EACH, UNTIED, Case, randomise, transformer_xl
from golden import assert_same
from memspan.errors import MemspanError
from memspan.lab.runs.checkpoint_files import weights_of
from memspan.models import EmbeddingConfig, LanguageModel
from memspan.models.embedding import tied_names
from readings import assert_memories_equal, every_case, some_memory, text


@every_case
def test_deepcopy_and_state_dict(case: Case) -> None:
    """The same model, but one of its own: changing it leaves the first alone, ties included."""
    model = case.shared_model()
    memory = some_memory(model, 2)
    loaded = randomise(case.model(), seed=1)
    expected = model(text(2, 4), memory).logits
    assert loaded.fingerprint() != model.fingerprint()
    loaded.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), loaded):
        assert other.fingerprint() == model.fingerprint()
        assert len([*other.parameters()]) == len([*model.parameters()])
        assert torch.equal(other(text(2, 4), memory).logits, expected)
        for parameter in other.parameters():
            parameter.data.add_(1.0)
        assert torch.equal(model(text(2, 4), memory).logits, expected)
        assert other.fingerprint() != model.fingerprint()


def _in_a_file(model: LanguageModel) -> LanguageModel:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def _filled(model: LanguageModel) -> LanguageModel:
    """Without values first, and as a part of something else."""
    weights = {f"0.{name}": tensor for name, tensor in model.state_dict().items()}
    nn.Sequential(model.to("meta").to_empty(device="cpu")).load_state_dict(weights)
    return model


def _assigned(model: LanguageModel) -> LanguageModel:
    """The file's tensors themselves; as in the files of runs, every tied one is there once."""
    weights = weights_of(model)
    model.to("meta").load_state_dict(weights, assign=True)
    return model


WAYS = {
    "deepcopy": copy.deepcopy,
    "file": _in_a_file,
    "filled": _filled,
    "assigned": _assigned,
    "converted": lambda model: model.float().double(),
}


@torch.no_grad()
@pytest.mark.parametrize("conversion", ["in place", "overwrite", "swap"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tie", ["all-but-first", "all"])
def test_tied_tensors_stay_tied(
    tie: Any, way: str, conversion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However torch replaces parameters, which it does name by name."""
    future = torch.__future__
    monkeypatch.setattr(future, "_overwrite_module_params_on_conversion", conversion == "overwrite")
    monkeypatch.setattr(future, "_swap_module_params_on_conversion", conversion == "swap")
    embedding = dataclasses.replace(ADAPTIVE, tie_projections=tie)
    model = transformer_xl(embedding).model()
    expected = model(text(2, 4)).logits
    ties = tied_names(model)
    names = [name for name, _ in model.named_parameters()]
    found = WAYS[way](model)
    assert tied_names(found) == ties
    assert ["embedding.tables.0", "head.tables.0"] in ties
    assert [name for name, p in found.named_parameters() if p.requires_grad] == names
    assert torch.equal(found(text(2, 4)).logits, expected)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("tie", ["all-but-first", "all", "none"])
def test_safetensors_loads_a_tied_model(tie: Any, wrapped: bool, tmp_path: Path) -> None:
    """As accelerate's ``load_state`` and the Hub's ``from_pretrained`` do: tied tensors are in the file
    once, and torch is to report the other names as missing."""
    case = transformer_xl(dataclasses.replace(ADAPTIVE, tie_projections=tie))
    path = tmp_path / "m"
    model = case.model()
    other = randomise(case.model(), seed=1)
    ties = tied_names(other)
    put = nn.Sequential if wrapped else nn.Identity()
    safetensors.torch.save_model(put(model), str(path))
    assert safetensors.torch.load_model(put(other), path) == (set(), [])
    assert other.fingerprint() == model.fingerprint()
    assert tied_names(other) == ties
    missing = nn.Sequential(other.to("meta")).load_state_dict(
        {f"0.{name}": tensor for name, tensor in weights_of(model).items()},
        strict=False,
        assign=True,
    )
    assert not missing.unexpected_keys
    assert tied_names(other) == ties
    assert other.fingerprint() == model.fingerprint()


@every_case
def test_memory_files_belong_to_a_model(case: Case, tmp_path: Path) -> None:
    model = case.shared_model()
    path = tmp_path / "memory"
    for memory in (model.initial_memory(2), some_memory(model, 2), model.reader(None, 2).memory):
        memory.save(path, model.fingerprint())
        loaded = type(memory).load(path, model.fingerprint())
        assert_memories_equal(loaded, memory)
        assert torch.equal(model(text(2, 4), loaded).logits, model(text(2, 4), memory).logits)
    other = randomise(case.model(), seed=1)
    with pytest.raises(MemspanError, match="another model"):
        type(memory).load(path, other.fingerprint())


@every_case
def test_memory_of_another_precision_is_taken(case: Case) -> None:
    """A memory that was stored in float32 can be read on from in float64."""
    model = case.shared_model()
    memory = some_memory(model, 2)
    rounded = memory.to(dtype=torch.float32)
    out = model(text(2, 3), rounded)
    expected = model(text(2, 3), memory)
    assert out.logits.dtype == torch.float64
    assert_same(out.logits, expected.logits, 1e-4, "logits")
    assert_same(model.reader(rounded).read(text(2, 3)), out.logits, 1e-6, "reader")


# ----- What torch.func does with a model leaves it what it was, tied embeddings included


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
    twin = copy.deepcopy(model)
    parameters = list(model.parameters())
    ties = tied_names(model)
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
    """Losses of one row, ``[T]``, as a function of the parameters."""
    options = {"targets": targets[None], "implementation": "reference"}
    return functional_call(model, parameters, (tokens[None],), options).losses.sum()


@every_case
def test_gradients_per_sample(case: Case) -> None:
    """Gradients of every row's loss at once. Without clusters, whose indexing vmap does not know."""
    model = dataclasses.replace(case, embedding=EMBEDDINGS["projected"]).model()
    tokens = text(3, LENGTH)
    targets = text(3, LENGTH, 1)
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
    shell = copy.deepcopy(models[0]).to("meta")
    tokens = text(2, LENGTH)

    def logits(*state: Parameters) -> Tensor:
        options = {"implementation": "reference"}
        return functional_call(shell, state, (tokens,), options).logits

    expected = torch.stack([model(tokens).logits for model in models])
    with unharmed(models[0]), unharmed(models[1]):
        found = vmap(logits)(*stack_module_state(models))
    assert_same(found, expected, 1e-9, "logits")
