"""Mistakes with tensors, from Python: each is one line that says what is wrong."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from architectures import CASES, VOCABULARY
from memspan.errors import MemspanError
from memspan.models import LanguageModel, LSTMConfig

pytestmark = pytest.mark.hardening
ARCHITECTURES = {
    "transformer-xl": "xl-segment",
    "adaptive": "xl-segment-clamp",
    "compressive": "compressive",
    "feedback": "feedback",
    "fast-weights": "fast-delta",
}
TOKENS = torch.arange(6).view(2, 3)


def calls(name: str) -> dict[str, tuple[Callable[[], Any], str]]:
    """Of one architecture: what is done, and what is said."""
    model = CASES[ARCHITECTURES[name]].model()
    other = CASES["fast-delta" if name == "compressive" else "compressive"].model()
    memory, tall = model.initial_memory(2), TOKENS.repeat(2, 1)
    wide = dataclasses.replace(CASES[ARCHITECTURES[name]].backbone, d_model=12, n_layers=3)
    foreign = dataclasses.replace(CASES[ARCHITECTURES[name]], backbone=wide).model()

    def read(tokens: Any = TOKENS, **options: Any) -> tuple[Callable[[], Any], ...]:
        return (
            lambda: model(tokens, memory, **options),
            lambda: model.reader(memory).read(tokens, **options),
        )

    bad = TOKENS.clone()
    bad[1, 2] = VOCABULARY
    starts = torch.zeros(2, 3, dtype=torch.bool)
    reader, one = model.reader(memory), model.initial_memory(1)
    d, vectors = model.backbone.config.d_model, model.backbone.reader(memory, 2)
    x = torch.zeros(2, 1, d, dtype=torch.float64)
    of_vectors = f"x must be a float64 tensor [2, length, {d}] on cpu, not a"
    meta = torch.ones(2, dtype=torch.bool, device="meta")
    wanted = "tokens must be an int64 tensor [rows, length], not "
    target = f"target {VOCABULARY} in row 1, column 2 is not in the vocabulary: ids lie in 0 .. "
    both = {
        "token too large": (read(bad), f"token {VOCABULARY} in row 1, column 2 is not"),
        "token below 0": (read(TOKENS - 1), "token -1 in row 0, column 0 is not in the vocab"),
        "token -100": (
            read(TOKENS.masked_fill(TOKENS == 4, -100)),
            "token -100 in row 1, column 1",
        ),
        "float tokens": (read(TOKENS.float()), f"{wanted}a tensor of float32 [2, 3]"),
        "int32 tokens": (read(TOKENS.int()), f"{wanted}a tensor of int32 [2, 3]"),
        "1-d tokens": (read(TOKENS[0]), f"{wanted}a tensor of int64 [3]"),
        "3-d tokens": (read(TOKENS[None]), f"{wanted}a tensor of int64 [1, 2, 3]"),
        "list": (read(TOKENS.tolist()), f"{wanted}a list"),
        "numpy": (read(TOKENS.numpy()), f"{wanted}a ndarray"),
        "target too large": (read(targets=bad), target),
        "target -1": (read(targets=TOKENS - 1), "target -1 in row 0, column 0 is not"),
        "targets of another shape": (
            read(targets=TOKENS[:, :2]),
            "int64 [2, 3] on cpu, to go with",
        ),
        "float targets": (read(targets=TOKENS.float()), "not a tensor of float32 [2, 3]"),
        "targets as a list": (read(targets=TOKENS.tolist()), "targets must be a tensor of int64"),
        "starts of another shape": (read(starts=starts[0]), "starts must be a tensor of bool [2,"),
        "int starts": (read(starts=starts.long()), "starts must be a tensor of bool [2, 3]"),
        "other rows": (read(tall), "2 rows"),
    }
    lengths = {
        "negative length": ([-1, 3], "lengths must lie in 0 .. 3"),
        "length too large": ([1, 4], "lengths must lie in 0 .. 3"),
        "length of every token": ([[1, 2, 3]] * 2, "lengths must be a tensor of int64 [2]"),
        "float lengths": ([1.0, 2.0], "lengths must be a tensor of int64 [2]"),
    }
    found: dict[str, tuple[Callable[[], Any], str]] = {
        "another padding": (
            lambda: model(TOKENS, lengths=torch.tensor([1, 2]), padding="both"),
            "there is no padding 'both': use right, left",
        ),
        "a memory of another kind": (
            lambda: model(TOKENS, other.initial_memory(2)),
            f"must be a {type(memory).__name__}, not a {type(other.initial_memory(2)).__name__}",
        ),
        "a reader of another kind": (
            lambda: model.reader(other.initial_memory(2)),
            f"must be a {type(memory).__name__}, not a",
        ),
        "no memory at all": (lambda: model(TOKENS, "memory"), "the memory must be a"),
        "a memory of other sizes": (
            lambda: model(TOKENS, foreign.initial_memory(2)),
            "the memory's ",
        ),
        "a reader of other sizes": (
            lambda: model.reader(foreign.initial_memory(2)),
            "the memory's ",
        ),
        "rows -1": (lambda: model.initial_memory(-1), "batch_size must be a number of rows"),
        "rows 2.5": (lambda: model.initial_memory(2.5), "not 2.5"),
        "rows of a reader": (lambda: model.reader(batch_size=-1), "not -1"),
        "reset with floats": (lambda: memory.reset([0.5, 1.0]), "needs one bool per row, [2], not"),
        "reset with ints": (lambda: memory.reset([0, 1]), "needs one bool per row, [2], not int64"),
        "reset of 3 rows": (lambda: memory.reset([True] * 3), "one bool per row, [2], not [3]"),
        "reset with words": (lambda: memory.reset("all"), "needs one bool per row, [2], not 'all'"),
        "ints to a reader": (lambda: reader.reset([0, 1]), "one bool per row, [2], not int64 [2]"),
        "3 rows to a reader": (lambda: reader.reset([True] * 3), "one bool per row, [2], not [3]"),
        "replace twice": (
            lambda: reader.replace([0, 0], memory),
            "replace needs row numbers in 0 .. 1, each at most once, not [0, 0]",
        ),
        "replace out of range": (lambda: reader.replace([2], one), "at most once, not [2]"),
        "replace -1": (lambda: memory.replace([-1], one), "at most once, not [-1]"),
        "replace with bools": (lambda: reader.replace([True], one), "at most once, not bool [1]"),
        "replace 1 by 2": (lambda: reader.replace([0], memory), "has 2 rows, to replace 1: give"),
        "replace by another kind": (
            lambda: reader.replace([0, 1], other.initial_memory(2)),
            f"not {type(other.initial_memory(2)).__name__}: give one of this model",
        ),
        "replace by nothing": (lambda: reader.replace([0], None), "not NoneType: give one of this"),
        "replace by other sizes": (
            lambda: reader.replace([0], foreign.initial_memory(1)),
            "use a memory of this model, of this size",
        ),
        "replace by meta": (
            lambda: reader.replace([0], one.to("meta")),
            "is meta int64 [1] on meta, not int64 [1]",
        ),
        "replace by integers": (
            lambda: reader.replace([0], one.map(torch.Tensor.long)),
            " on cpu, not float64 [1, ",
        ),
        "a meta mask": (lambda: reader.reset(meta), "per row, [2], not meta bool [2]"),
        "a sparse mask": (
            lambda: reader.reset(torch.tensor([True, False]).to_sparse()),
            "per row, [2], not sparse bool [2]",
        ),
        "vectors of another width": (lambda: vectors.read(x[..., 1:]), f"{of_vectors} tensor of"),
        "vectors of 1 row": (lambda: vectors.read(x[:1]), f"float64 [1, 1, {d}] on cpu"),
        "vectors of 3 rows": (lambda: vectors.read(x[[0, 1, 1]]), f"float64 [3, 1, {d}] on cpu"),
        "one vector per row": (lambda: vectors.read(x[:, 0]), f"float64 [2, {d}] on cpu"),
        "vectors of integers": (lambda: vectors.read(x.long()), f"int64 [2, 1, {d}] on cpu"),
        "vectors of float32": (lambda: vectors.read(x.float()), f"float32 [2, 1, {d}] on cpu"),
        "float32 in a pass": (lambda: model.backbone(x.float()), f"float32 [2, 1, {d}] on cpu"),
        "vectors on meta": (lambda: vectors.read(x.to("meta")), f"float64 [2, 1, {d}] on meta"),
        "vectors as a list": (lambda: vectors.read(x.tolist()), f"{of_vectors} list"),
        "starts of vectors": (
            lambda: vectors.read(x, starts[:, 0]),
            "starts must be a tensor of bool [2, 1]",
        ),
        "select out of range": (lambda: memory.select([0, 2]), "0 .. 1, not [0, 2]"),
        "select -1": (lambda: memory.select([-1]), "select needs row numbers in 0 .. 1, not [-1]"),
        "a reader's row 2": (lambda: reader.select([0, 2]), "numbers in 0 .. 1, not [0, 2]"),
        "select with floats": (lambda: memory.select([0.5]), "numbers in 0 .. 1, not float32 [1]"),
        "select with bools": (lambda: memory.select([True, False]), "in 0 .. 1, not bool [2]"),
        "no targets": (lambda: model(TOKENS).loss, "no loss without targets"),
    }
    for field, slots in one.slots().items():
        for count in (-3, slots + 1, 10**6):
            bad_one = dataclasses.replace(one, **{field: getattr(one, field) + count})
            said = f"the memory's {field} must be int64 [1], in 0 .. {slots}, not {count:,} .. "
            found |= {
                f"{field} {count}": ((lambda bad=bad_one: model.reader(bad)), said),
                f"{field} {count}, replace": ((lambda bad=bad_one: reader.replace([0], bad)), said),
                f"{field} {count}, value": ((lambda bad=bad_one: memory.replace([0], bad)), said),
            }
        short = dataclasses.replace(one, **{field: getattr(one, field)[:0]})
        found[f"no {field}"] = (
            (lambda bad=short: model.reader(bad)),
            f"the memory's {field} is int64 [0] on cpu, not int64 [1]",
        )
    for label, ((call, reads), said) in both.items():
        found |= {label: (call, said), f"{label}, reader": (reads, said)}
    for label, (values, said) in lengths.items():
        found[label] = ((lambda v=values: model(TOKENS, lengths=torch.tensor(v))), said)
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_mistakes_are_one_line(name: str) -> None:
    for label, (call, wanted) in calls(name).items():
        with pytest.raises(MemspanError) as caught:
            call()
        assert wanted in str(caught.value), label
        assert "\n" not in str(caught.value), label


ONE_EACH = [*ARCHITECTURES.values(), "lstm", "transformer"]


@pytest.mark.parametrize("name", ONE_EACH)
def test_other_devices_are_refused(name: str) -> None:
    """Torch reads whatever is in memory where tokens are on the meta device."""
    model = CASES[name].model()
    memory, meta, reader = model.initial_memory(2), TOKENS.to("meta"), model.reader(batch_size=2)
    x = torch.zeros(2, 3, model.backbone.config.d_model, dtype=torch.float64)
    moved = memory.to("meta")
    for attempt in (
        lambda: model(meta),
        lambda: reader.read(meta),
        lambda: model(TOKENS, targets=meta),
        lambda: model(TOKENS, starts=meta == 0),
        lambda: reader.read(TOKENS, starts=meta == 0),
        lambda: model(TOKENS, lengths=meta[:, 0]),
        lambda: model(TOKENS, moved),
        lambda: model.reader(moved),
        lambda: model.backbone(x.to("meta")),
        lambda: model.backbone(x.to("meta"), moved),
        lambda: model.backbone.reader(moved, 2),
    ):
        with pytest.raises(MemspanError, match="on meta"):
            attempt()
    assert reader.memory.tokens_seen.tolist() == [0, 0]


@pytest.mark.parametrize("name", ONE_EACH)
def test_readers_are_not_copied(name: str) -> None:
    """A copy would share its buffers, and pickle knows no pointers; the memory is the value."""
    model = CASES[name].model()
    reader = model.reader(batch_size=2)
    reader.read(TOKENS)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        for each in (reader, reader._backbone):
            with pytest.raises(MemspanError, match=r"take its memory, a value, .* model\.reader"):
                copied(each)
    assert copy.deepcopy(reader.memory).tokens_seen.tolist() == [3, 3]


@pytest.mark.parametrize("name", ONE_EACH)
def test_backbones_refuse_what_language_models_do(name: str) -> None:
    """Vectors and memories of others, whole passes and readers, without values being looked at."""
    backbone = CASES[name].model().backbone
    d = backbone.config.d_model
    x, memory = torch.zeros(2, 3, d, dtype=torch.float64), backbone.initial_memory(2)
    for wrong in (x[..., 1:], x[0], x.long(), x.tolist()):
        with pytest.raises(MemspanError, match=rf"tensor \[rows, length, {d}\] on cpu, not a"):
            backbone(wrong, memory)
    with pytest.raises(MemspanError, match="the memory has 2 rows and the input has 1"):
        backbone(x[:1], memory)
    kind = type(memory).__name__
    others = [CASES[other].model().initial_memory(2) for other in ONE_EACH]
    for other in [m for m in others if type(m) is not type(memory)]:
        for attempt in (lambda m=other: backbone(x, m), lambda m=other: backbone.reader(m, 2)):
            with pytest.raises(MemspanError, match=f"must be a {kind}, not a"):
                attempt()
    for field, tensor in memory.tensors().items():
        # The tokens say how many rows there are.
        wrongs = [] if field == "tokens_seen" else [tensor[:1]]
        wrongs += [tensor[..., None], tensor.int()]
        if field in {"tokens_seen", *memory.slots()}:
            wrongs += [tensor - 1, tensor + (1 << 62) + 1]
        for wrong in wrongs:
            bad = dataclasses.replace(memory, **{field: wrong})
            for attempt in (lambda m=bad: backbone(x, m), lambda m=bad: backbone.reader(m, 2)):
                with pytest.raises(MemspanError, match=f"the memory's {field} "):
                    attempt()


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((256, {}), "the backbone must be a config, such as TransformerXLConfig(), not {}"),
        ((256, None), "TransformerXLConfig(), not None"),
        ((256, LSTMConfig), "TransformerXLConfig(), not <class '"),
        (
            (256, LSTMConfig(), {"tie": False}),
            "the embedding must be EmbeddingConfig(), not {'tie'",
        ),
        ((0, LSTMConfig()), "vocab_size must be an integer of at least 1, not 0"),
        (("256", LSTMConfig()), "at least 1, not '256'"),
    ],
    ids=str,
)
def test_a_model_is_made_of_options(arguments: tuple[Any, ...], wanted: str) -> None:
    with pytest.raises(MemspanError) as caught:
        LanguageModel(*arguments)
    assert wanted in str(caught.value)


@pytest.mark.parametrize("name", [*ARCHITECTURES, "lstm", "transformer"])
def test_a_reader_survives_mistakes(name: str) -> None:
    """What is refused changes nothing."""
    model = CASES[ARCHITECTURES.get(name, name)].model()
    other = CASES["lstm" if name != "lstm" else "feedback"].model()
    reader, expected = (model.reader(model(TOKENS).memory) for _ in range(2))
    one = model.initial_memory(1)
    damaged = [dataclasses.replace(one, **{k: t[:0]}) for k, t in one.tensors().items()]
    damaged += [dataclasses.replace(one, **{k: t.bool()}) for k, t in one.tensors().items()]
    damaged += [dataclasses.replace(one, **{k: getattr(one, k) - 1}) for k in one.slots()]
    mistakes = (
        lambda: reader.reset([True]),
        lambda: reader.replace([0, 0], model.initial_memory(2)),
        lambda: reader.replace([0], model.initial_memory(2)),
        lambda: reader.replace([0], other.initial_memory(1)),
        *((lambda bad=memory: reader.replace([1], bad)) for memory in damaged),
        lambda: reader._backbone.read(torch.zeros(1, 1, 8, dtype=torch.float64)),
    )
    for mistake in mistakes:
        with pytest.raises(MemspanError):
            mistake()
    assert torch.equal(reader.read(TOKENS), expected.read(TOKENS))
