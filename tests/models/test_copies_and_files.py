"""Models and memories as things to be copied and stored, and memories that do not fit."""

from __future__ import annotations

import copy
import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from architectures import ADAPTIVE, Case, randomise, transformer_xl
from golden import assert_same
from memspan.errors import MemspanError
from memspan.models import LanguageModel
from memspan.models.embedding import tied_names
from memspan.runs.checkpoint_files import weights_of
from readings import assert_memories_equal, every_case, some_memory, text

pytestmark = pytest.mark.gradients(recorded=False)


@every_case
def test_deepcopy_and_state_dict(case: Case) -> None:
    """The same model, but one of its own: changing it leaves the first alone, ties included."""
    model = case.shared_model()
    memory, loaded = some_memory(model, 2), randomise(case.model(), seed=1)
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


@pytest.mark.parametrize("conversion", ["in place", "overwrite", "swap"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tie", ["all-but-first", "all"])
def test_what_is_tied_stays_tied(
    tie: Any, way: str, conversion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However torch replaces parameters, which it does name by name."""
    future = torch.__future__
    monkeypatch.setattr(future, "_overwrite_module_params_on_conversion", conversion == "overwrite")
    monkeypatch.setattr(future, "_swap_module_params_on_conversion", conversion == "swap")
    embedding = dataclasses.replace(ADAPTIVE, tie_projections=tie)
    model = transformer_xl(embedding).model()
    expected, ties = model(text(2, 4)).logits, tied_names(model)
    names = [name for name, _ in model.named_parameters()]
    found = WAYS[way](model)
    assert tied_names(found) == ties
    assert ["embedding.tables.0", "head.tables.0"] in ties
    assert [name for name, p in found.named_parameters() if p.requires_grad] == names
    assert torch.equal(found(text(2, 4)).logits, expected)


@every_case
def test_memory_files_belong_to_a_model(case: Case, tmp_path: Path) -> None:
    model, path = case.shared_model(), tmp_path / "memory"
    for memory in (model.initial_memory(2), some_memory(model, 2), model.reader(None, 2).memory):
        memory.save(path, model.fingerprint())
        loaded = type(memory).load(path, model.fingerprint())
        assert_memories_equal(loaded, memory)
        assert torch.equal(model(text(2, 4), loaded).logits, model(text(2, 4), memory).logits)
    other = randomise(case.model(), seed=1)
    with pytest.raises(MemspanError, match="another model"):
        type(memory).load(path, other.fingerprint())


@every_case
def test_a_memory_of_another_precision(case: Case) -> None:
    """A memory that was stored in float32 can be read on from in float64."""
    model = case.shared_model()
    memory = some_memory(model, 2)
    rounded = memory.to(dtype=torch.float32)
    out, expected = model(text(2, 3), rounded), model(text(2, 3), memory)
    assert out.logits.dtype == torch.float64
    assert_same(out.logits, expected.logits, 1e-4, "logits")
    assert_same(model.reader(rounded).read(text(2, 3)), out.logits, 1e-6, "reader")
