"""Memories, outputs and options as trees, and one step by ``torch.export``."""

from __future__ import annotations

import io

import pytest
import torch
from torch.utils import _pytree as pytree

from architectures import CASES, ONE_OF_EACH
from memspan.errors import MemspanError
from readings import assert_memories_equal, text


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_values_come_back_from_their_leaves(name: str) -> None:
    model = CASES[name].shared_model()
    output = model(text(2, 3), None, targets=text(2, 3))
    for value in (output, output.memory, model.backbone(torch.zeros(1, 2, 8).double())):
        leaves, form = pytree.tree_flatten(value)
        again = pytree.tree_unflatten(leaves, form)
        assert type(again) is type(value)
        assert all(map(lambda a, b: a is b, pytree.tree_leaves(again), leaves))
    doubled = pytree.tree_map(lambda t: 2 * t, output.memory)
    assert torch.equal(doubled.tokens_seen, 2 * output.memory.tokens_seen)
    # Not tensors: no memory that anything may be done with, but a tree.
    assert pytree.tree_map(lambda t: t.shape[0], output.memory).tokens_seen == 2
    leaves, form = pytree.tree_flatten((model.backbone.config, output.memory.tokens_seen))
    assert len(leaves) == 1
    assert pytree.tree_unflatten(leaves, form)[0] is model.backbone.config


@torch.no_grad()
# Of torch's own LSTM.
@pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights")
# Of torch 2.10's own reading.
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_a_step_is_exported(name: str) -> None:
    """To a file, with its memory as a value that goes in and comes out, as often as one likes, and for
    any number of rows."""
    # Tracing takes time for each layer, and they are alike.
    model = CASES[name].with_options(n_layers=1).model(torch.float32)
    memory = model(text(3, 5)).memory
    file = io.BytesIO()
    rows = {0: torch.export.Dim("rows", min=2)}
    shapes = (rows, [rows for _ in memory.tensors()])
    exported = torch.export.export(model, (text(3, 1), memory), dynamic_shapes=shapes)
    torch.export.save(exported, file)
    step = torch.export.load(io.BytesIO(file.getvalue())).module()
    for n_rows in (2, 7):
        memory = model(text(n_rows, 5)).memory
        for n in range(3):
            token = text(n_rows, 1, n)
            expected = model(token, memory)
            found = step(token, memory)
            torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
            memory = found.memory
            assert_memories_equal(memory, expected.memory, 1e-4)


@pytest.mark.parametrize("name", ["transformer-xl", "compressive"])
def test_rows_are_free_where_gradients_are_recorded(name: str) -> None:
    model = CASES[ONE_OF_EACH[name]].with_options(n_layers=1).model(torch.float32)
    memory = model(text(3, 5)).memory.detach()
    rows = {0: torch.export.Dim("rows", min=2)}
    shapes = (rows, [rows for _ in memory.tensors()])
    read = torch.export.export(model, (text(3, 4), memory), dynamic_shapes=shapes).module()
    memory = model(text(2, 5)).memory.detach()
    expected = model(text(2, 4), memory)
    torch.testing.assert_close(read(text(2, 4), memory).logits, expected.logits)


@torch.no_grad()
@pytest.mark.parametrize("name", ["transformer", "transformer-xl", "compressive"])
def test_attention_is_exported_for_any_segment(name: str) -> None:
    """Loops over tokens or chunks are exported for segments of one length."""
    model = CASES[ONE_OF_EACH[name]].with_options(n_layers=1).model(torch.float32)
    memory = model(text(3, 5)).memory
    shapes = ({1: torch.export.Dim.DYNAMIC}, [{} for _ in memory.tensors()])
    read = torch.export.export(model, (text(3, 6), memory), dynamic_shapes=shapes).module()
    for length in (7, 12):
        expected = model(text(3, length), memory)
        found = read(text(3, length), memory)
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
        assert_memories_equal(found.memory, expected.memory, 1e-4)


@pytest.mark.parametrize("name", ["infini", "lstm", "rmt"])
def test_documents_as_rows_of_their_own_are_not_exported(name: str) -> None:
    model = CASES[ONE_OF_EACH[name]].model(torch.float32)
    given = {"lengths": torch.tensor([4, 2, 1])}
    with pytest.raises(MemspanError, match="export it without"):
        torch.export.export(model, (text(3, 4), model.initial_memory(3)), given)
