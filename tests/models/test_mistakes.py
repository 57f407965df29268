"""Mistakes with tensors, from Python: each is one line that says what is wrong."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from architectures import CASES, ONE_OF_EACH, VOCABULARY
from memspan import layers
from memspan.errors import MemspanError
from memspan.memory import Memory
from memspan.models import EmbeddingConfig, LanguageModel, LSTMConfig
from memspan.trees import described
from readings import assert_memories_equal

pytestmark = pytest.mark.hardening
TOKENS = torch.arange(6).view(2, 3)
each = pytest.mark.parametrize("name", ONE_OF_EACH.values())


def refused(says: str, *attempts: Callable[[], Any]) -> None:
    for attempt in attempts:
        with pytest.raises(MemspanError) as caught:
            attempt()
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


def damaged(memory: Memory) -> Iterator[tuple[Memory, str]]:
    """An empty memory whose fields, one after the other, are of another size or type, or count what
    cannot be."""
    for field, tensor in memory.tensors().items():
        # The tokens say how many rows there are.
        wrongs = [] if field == "tokens_seen" else [tensor[1:]]
        wrongs += [tensor[..., None], tensor.int()]
        most = {"tokens_seen": 1 << 62, **memory.slots()}.get(field)
        wrongs += [] if most is None else [tensor - 1, tensor + most + 1]
        for wrong in wrongs:
            yield dataclasses.replace(memory, **{field: wrong}), f"the memory's {field} "


@each
def test_tokens_targets_starts_and_lengths(name: str) -> None:
    """By the model and by its reader."""
    model = CASES[name].shared_model()
    memory = model.initial_memory(2)
    reader = model.reader(batch_size=2)
    bad = TOKENS.clone()
    starts = torch.zeros(2, 3, dtype=torch.bool)
    bad[1, 2] = VOCABULARY
    wanted = "tokens must be an int64 tensor [rows, length], not "
    outside = "is not in the vocab"
    for given, said in (
        (bad, f"token {VOCABULARY} in row 1, column 2 {outside}"),
        (TOKENS - 1, f"token -1 in row 0, column 0 {outside}"),
        (TOKENS.float(), f"{wanted}a tensor of float32 [2, 3]"),
        (TOKENS[0], f"{wanted}a tensor of int64 [3]"),
        (TOKENS.tolist(), f"{wanted}a list"),
        (TOKENS.repeat(2, 1), "2 rows"),
        # Torch reads whatever is in memory where tokens are on the meta device.
        (TOKENS.to("meta"), "on meta"),
    ):
        refused(said, partial(model, given, memory), partial(reader.read, given))
    assert reader.memory.tokens_seen.tolist() == [0, 0]
    for options, said in (
        ({"targets": bad}, f"target {VOCABULARY} in row 1, column 2 is not in the vocabulary: ids"),
        ({"targets": TOKENS - 1}, "target -1 in row 0, column 0 is not"),
        ({"targets": TOKENS[:, :2]}, "int64 [2, 3] on cpu, to go with"),
        ({"targets": TOKENS.float()}, "not a tensor of float32 [2, 3]"),
        ({"targets": TOKENS.tolist()}, "targets must be a tensor of int64"),
        ({"targets": TOKENS.to("meta")}, "on meta"),
        ({"starts": starts[0]}, "starts must be a tensor of bool [2, 3]"),
        ({"starts": starts.long()}, "starts must be a tensor of bool [2, 3]"),
    ):
        refused(said, partial(model, TOKENS, **options), partial(reader.read, TOKENS, **options))
    assert not reader.memory.tokens_seen.any()
    for lengths, said in (
        (torch.tensor([-1, 3]), "lengths must lie in 0 .. 3"),
        (torch.tensor([1, 4]), "lengths must lie in 0 .. 3"),
        (torch.tensor([1.0, 2.0]), "lengths must be integers [2], the tokens of each row, not "),
        (TOKENS, "lengths must be integers [2], the tokens of each row, not "),
        ([1, 2, 3], "lengths must be integers [2], the tokens of each row, not int64 [3]"),
        (torch.tensor([1, 2], device="meta"), "on meta"),
    ):
        refused(said, partial(model, TOKENS, lengths=lengths))
    lengths = torch.tensor([1, 2])
    refused("no padding 'both': use", partial(model, TOKENS, lengths=lengths, padding="both"))
    refused("no loss without targets", lambda: model(TOKENS).loss)


@each
def test_vectors_and_memories(name: str) -> None:
    """Memories of other models, in whole passes and in readers, by backbones and by language models."""
    model = CASES[name].shared_model()
    backbone = model.backbone
    memory = model.initial_memory(2)
    d = backbone.config.d_model
    x = torch.zeros(2, 3, d, dtype=torch.float64)
    vectors = backbone.reader(memory, 2)
    for wrong, said in (
        (x[..., 1:], f"float64 [2, 3, {d - 1}] on cpu"),
        (x[:, 0], f"float64 [2, {d}] on cpu"),
        (x.float(), f"float32 [2, 3, {d}] on cpu"),
        (x.long(), f"int64 [2, 3, {d}] on cpu"),
        (x.to("meta"), f"float64 [2, 3, {d}] on meta"),
        (x.tolist(), f"x must be a float64 tensor [rows, length, {d}] on cpu, not a list"),
    ):
        refused(said, partial(backbone, wrong, memory))
        refused(said.replace("rows", "2"), partial(vectors.read, wrong))
    for wrong, said in (
        (x[:1, 0], f"tensor [2, {d}] on cpu, not a tensor of float64 [1, {d}]"),
        (x[:, 0, 1:], f"not a tensor of float64 [2, {d - 1}] on cpu"),
        (x, f"not a tensor of float64 [2, 3, {d}] on cpu"),
        (x[:, 0].float(), f"not a tensor of float32 [2, {d}] on cpu"),
        (x[:, 0].numpy(), "not a ndarray"),
        (x[:, 0].to("meta"), f"[2, {d}] on meta"),
    ):
        refused(said, partial(vectors.step, wrong))
    refused("the memory has 2 rows and the input has 1", partial(backbone, x[:1], memory))
    refused("float64 [1, 3, ", partial(vectors.read, x[:1]))
    refused("starts must be a tensor of bool [2, 3]", partial(vectors.read, x, x[:, 0, 0] > 0))
    assert_memories_equal(vectors.memory, memory)

    kind = type(memory)
    foreign = CASES[name].with_options(d_model=12, n_layers=3).model().initial_memory(2)
    found: list[tuple[Any, str]] = [("memory", "the memory must be a")]
    found += [(memory.to("meta"), "on meta")] + [(foreign, "the memory's ")] * (
        name != "transformer"
    )
    for other in ONE_OF_EACH.values():
        another = CASES[other].shared_model().initial_memory(2)
        if type(another) is not kind:
            found.append((another, f"must be a {kind.__name__}, not {described(another)}"))
    for wrong, said in (*found, *damaged(memory)):
        refused(said, partial(backbone, x, wrong), partial(model, TOKENS, wrong))
        refused(said, partial(backbone.reader, wrong, 2), partial(model.reader, wrong))
    for rows in (-1, 2.5):
        refused(f"not {rows}", partial(model.initial_memory, rows))
    refused("not -1", lambda: model.reader(batch_size=-1))


@each
def test_rows_of_memories_and_of_readers(name: str) -> None:
    """A refusal changes nothing."""
    model = CASES[name].shared_model()
    reader, expected = (model.reader(model(TOKENS).memory) for _ in range(2))
    memory = model.initial_memory(2)
    one = model.initial_memory(1)
    another = CASES["lstm" if name != "lstm" else "feedback"].shared_model().initial_memory(1)
    for mask, said in (
        ([0.5, 1.0], "needs one bool per row, [2], not"),
        ([0, 1], "needs one bool per row, [2], not int64 [2]"),
        ([True] * 3, "one bool per row, [2], not [3]"),
        ("all", "needs one bool per row, [2], not 'all'"),
        (torch.ones(2, dtype=torch.bool, device="meta"), "per row, [2], not meta bool [2]"),
        (torch.tensor([True, False]).to_sparse(), "per row, [2], not sparse bool [2]"),
    ):
        refused(said, partial(memory.reset, mask), partial(reader.reset, mask))
    for rows, said in (
        ([0, 2], "select needs row numbers in 0 .. 1, not [0, 2]"),
        ([-1], "numbers in 0 .. 1, not [-1]"),
        ([0.5], "numbers in 0 .. 1, not float32 [1]"),
        ([True, False], "in 0 .. 1, not bool [2]"),
    ):
        refused(said, partial(memory.select, rows), partial(reader.select, rows))
    for rows, given, said in (
        ([0, 0], memory, "replace needs row numbers in 0 .. 1, each at most once, not [0, 0]"),
        ([2], one, "at most once, not [2]"),
        ([-1], one, "at most once, not [-1]"),
        ([True], one, "at most once, not bool [1]"),
        ([0], memory, "has 2 rows, to replace 1: give"),
        ([0], another, f"not a {type(another).__name__}: use one"),
        ([0], None, "not a NoneType: use one"),
        ([0], one.to("meta"), "is meta int64 [1] on meta, not int64 [1]"),
        *(([0], bad, said) for bad, said in damaged(one)),
    ):
        refused(said, partial(memory.replace, rows, given), partial(reader.replace, rows, given))
    assert torch.equal(reader.read(TOKENS), expected.read(TOKENS))


@each
def test_a_model_made_in_inference_mode_is_trained_as_a_copy(name: str) -> None:
    with torch.inference_mode():
        model = LanguageModel(VOCABULARY, CASES[name].backbone)
        vectors = torch.zeros(2, 3, model.backbone.config.d_model)
    refused(
        "or train copy.deepcopy(model), copied outside",
        lambda: model(TOKENS),
        lambda: model.backbone(vectors.clone()),
    )
    copy.deepcopy(model)(TOKENS, targets=TOKENS).loss.backward()


@each
def test_parameters_of_several_types_are_named(name: str) -> None:
    model = LanguageModel(VOCABULARY, CASES[name].backbone).eval()
    vectors = torch.zeros(2, 3, model.backbone.config.d_model)
    part = [m for m in model.backbone.modules() if [*m.parameters(recurse=False)]][-2]
    part.to(torch.bfloat16)
    reader = model.backbone.reader(None, 2)
    refused(
        "bfloat16",
        lambda: model(TOKENS),
        lambda: model.backbone(vectors),
        lambda: model.reader(batch_size=2).read(TOKENS),
        lambda: reader.read(vectors),
        lambda: reader.step(vectors[:, 0]),
    )


@each
def test_readers_are_not_copied(name: str) -> None:
    """A copy would share its buffers, and pickle knows no pointers; the memory is the value."""
    reader = CASES[name].shared_model().reader(batch_size=2)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        for one in (reader, reader._backbone):
            with pytest.raises(MemspanError, match=r"take its memory, a value, .* model\.reader"):
                copied(one)


def test_a_model_is_made_of_options() -> None:
    make = partial(LanguageModel, 256)
    config = LSTMConfig()
    backbone = "the backbone must be a config, such as TransformerXLConfig(), not "
    refused(f"{backbone}{{}}", lambda: make({}))
    refused(f"{backbone}<class '", lambda: make(LSTMConfig))
    refused("must be EmbeddingConfig(), not {'tie'", lambda: make(config, {"tie": False}))
    for size in (0, "256"):
        said = f"vocab_size must be an integer of at least 1, not {size!r}"
        refused(said, partial(LanguageModel, size, config))


def test_backbones_and_layers_are_made_of_their_options() -> None:
    made = [type(CASES[name].shared_model().backbone) for name in ONE_OF_EACH.values()]
    for kind in (
        *made,
        layers.TransformerXLLayer,
        layers.TransformerXLAttention,
        layers.CompressiveLayer,
        layers.CompressiveAttention,
        layers.FastWeightsLayer,
        layers.FastWeightsAttention,
        layers.GatedDeltaNetLayer,
        layers.GatedDeltaRule,
        layers.InfiniLayer,
        layers.InfiniAttention,
    ):
        for wrong in (32, None, type(CASES["xl-segment"].backbone), EmbeddingConfig()):
            refused(f"{kind.__name__} is made of options, such as ", partial(kind, wrong))
    refused(
        "a GatedDeltaNetLayer is made of options, such as GatedDeltaNetConfig(d_model=64), not of 32",
        partial(layers.GatedDeltaNetLayer, 32),  # type: ignore[arg-type]
    )


def test_a_compression_needs_what_it_compresses_by() -> None:
    layer: Any = CASES["compressive-most-used"].shared_model().backbone.layers[0]
    x = torch.zeros(1, 4, 8, dtype=torch.float64)
    refused("needs the attention that each", partial(layer.attention.compression, x, None))
