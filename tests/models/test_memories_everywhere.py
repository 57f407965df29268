"""Memories of every architecture, however they came about, and everything that is done with them."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from architectures import CASES, ONE_OF_EACH
from memspan import layers
from memspan.errors import MemspanError, NonFiniteError
from memspan.memory import Memory, concatenate
from memspan.models import (
    CompressiveConfig,
    FastWeightsConfig,
    GatedDeltaNetConfig,
    InfiniConfig,
    LanguageModel,
    TransformerXLConfig,
)
from readings import text

each = pytest.mark.parametrize("name", ONE_OF_EACH.values())
ROWS = (0, 1, 2, 5)


@each
def test_a_memory_stored_in_half_precision_is_read_on_in_full(name: str) -> None:
    model = CASES[name].shared_model(torch.float32)
    stored = model(text(2, 7)).memory.detach().to(torch.float16)
    full = stored.to(torch.float32)
    output = model(text(2, 7, 1), stored)
    expected = model(text(2, 7, 1), full)
    assert torch.equal(output.logits, expected.logits)
    for field, tensor in output.memory.tensors().items():
        assert torch.equal(tensor, expected.memory.tensors()[field])
        assert tensor.dtype == expected.memory.tensors()[field].dtype


def origins(model: LanguageModel, rows: int, path: Path) -> Iterator[tuple[str, Memory]]:
    """Each way in which a memory of so many rows comes about."""
    tokens = text(rows, 6)
    every = list(range(rows))
    read = model(tokens).memory
    larger = model(text(2 * rows + 1, 6)).memory
    starts = torch.zeros(rows, 6, dtype=torch.bool)
    starts[:, 3] = True
    yield "initial", model.initial_memory(rows)
    yield "forward", read
    yield "detach", read.detach()
    with torch.inference_mode():
        yield "inference mode", model(tokens, read).memory
    reader = model.reader(batch_size=rows)
    reader.read(tokens)
    reader.read(tokens[:, :1])
    yield "reader", reader.memory
    yield "reader.select", reader.select(every)
    reader.read(tokens, starts=starts)
    reader.reset([True] * rows)
    yield "reader.reset", reader.memory
    yield "reset", read.reset([True] * rows)
    yield "slice", larger[1 : rows + 1]
    yield "stride", larger[1::2]
    yield "index", larger[0] if rows == 1 else larger[every]
    yield "select", larger.select([0] * rows)
    yield "concatenate", concatenate([larger[:rows], read[:0]])
    yield "starts", model(tokens, read, starts=starts).memory
    yield "lengths", model(tokens, read, lengths=[4] * rows, padding="left").memory
    yield "nothing read", model(tokens[:, :0], read).memory
    yield "expanded", larger[:1].map(lambda t: t.expand(rows, *t.shape[1:]))
    read.save(path, model.fingerprint())
    yield "file", model.load_memory(path)
    yield "to", read.to("cpu", torch.bfloat16)


def saved(model: LanguageModel, memory: Memory, path: Path) -> Memory:
    memory.save(path, model.fingerprint())
    return model.load_memory(path, batch_size=len(memory))


def in_bytes(model: LanguageModel, memory: Memory, _: Path) -> Memory:
    file = io.BytesIO()
    memory.save(file, model.fingerprint())
    return model.load_memory(io.BytesIO(file.getvalue()))


def by_torch(model: LanguageModel, memory: Memory, path: Path) -> Memory:
    path = path.with_suffix(".pt")
    torch.save({"memory": memory}, path)
    return torch.load(path)["memory"]


SIZES: dict[str, Any] = {"d_model": 8, "n_heads": 2, "d_ff": 8}
LAYERS = {
    "transformer-xl": layers.TransformerXLLayer(TransformerXLConfig(memory_length=3, **SIZES)),
    "compressive": layers.CompressiveLayer(CompressiveConfig(memory_length=3, **SIZES)),
    "fast-weights": layers.FastWeightsLayer(FastWeightsConfig(**SIZES)),
    "gated-delta-net": layers.GatedDeltaNetLayer(GatedDeltaNetConfig(**SIZES)),
    "infini": layers.InfiniLayer(InfiniConfig(block_length=3, **SIZES)),
}

Journey = Callable[[LanguageModel, Memory, Path], Memory]
UNCHANGED: dict[str, Journey] = {
    "file": saved,
    "bytes": in_bytes,
    "torch.save": by_torch,
    "pickle": lambda _, memory, __: pickle.loads(pickle.dumps(memory)),
    "copy": lambda _, memory, __: copy.copy(memory),
    "deepcopy": lambda _, memory, __: copy.deepcopy(memory),
    "to": lambda _, memory, __: memory.to("cpu"),
    "select": lambda _, memory, __: memory.select(list(range(len(memory)))),
    "slice": lambda _, memory, __: memory[:],
    "concatenate": lambda _, memory, __: concatenate([memory, memory[:0]]),
    "collate": lambda _, memory, __: default_collate([memory, memory[:0]]),
    "replace": lambda _, memory, __: memory.replace(list(range(len(memory))), memory),
    "reset": lambda _, memory, __: memory.reset([False] * len(memory)),
}


# Filling no rows at random.
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@each
@pytest.mark.parametrize("rows", ROWS)
def test_a_memory_survives_whatever_is_done_with_it(name: str, rows: int, tmp_path: Path) -> None:
    model = CASES[name].shared_model(torch.float32)
    tokens = text(rows, 3)
    for origin, memory in origins(model, rows, tmp_path / "first"):
        for journey, go in UNCHANGED.items():
            after = go(model, memory.detach(), tmp_path / "second")
            assert after == memory, (origin, journey)
        expected = model(tokens, memory).logits
        reader = model.reader(memory)
        torch.testing.assert_close(reader.read(tokens), expected, rtol=1e-3, atol=1e-3)
        reader.replace(list(range(rows)), memory)
        torch.testing.assert_close(reader.read(tokens), expected, rtol=1e-3, atol=1e-3)
        assert len(memory.select([0] * min(rows, 1))) == min(rows, 1)


@each
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("made", ["memory", "initial", "reader"])
def test_training_goes_on_from_inference_mode(name: str, rows: int, made: str) -> None:
    """With the gradients that the same memory gives that was made outside."""
    model = CASES[name].model(torch.float32)
    tokens = text(rows, 4)

    def memory() -> Memory:
        reader = model.reader(batch_size=rows)
        reader.read(tokens)
        return {
            "memory": lambda: model(tokens).memory.detach(),
            "initial": lambda: model.initial_memory(rows),
            "reader": lambda: reader.memory,
        }[made]()

    def gradients(before: Memory) -> list[torch.Tensor]:
        model.zero_grad()
        model(tokens, before, targets=tokens).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    with torch.inference_mode():
        before = memory()
    torch.testing.assert_close(gradients(before), gradients(memory()), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_trains_from_inference_mode(name: str) -> None:
    layer = LAYERS[name]
    with torch.inference_mode():
        memory = layer(torch.randn(1, 3, 8))[1]
    layer(torch.randn(1, 3, 8), memory.detach())[0].sum().backward()


def test_a_window_survives_too(tmp_path: Path) -> None:
    """The transformer's, whose readers may carry another memory than it begins with."""
    model = CASES["transformer"].shared_model(torch.float32)
    for rows in ROWS:
        reader = model.reader(batch_size=rows, window=4)
        reader.read(text(rows, 6))
        for journey, go in UNCHANGED.items():
            assert go(model, reader.memory, tmp_path / "window") == reader.memory, journey


@torch.no_grad()
@each
@pytest.mark.parametrize("rows", [1, 3])
def test_a_memory_may_have_any_strides(name: str, rows: int) -> None:
    """As what others compute, slice or transpose has: steps in C take their own."""
    model = CASES[name].shared_model(torch.float32)
    token = text(rows, 1)
    memory = model(text(rows, 6)).memory
    expected = model(token, memory).logits
    for strided in (
        memory.map(lambda t: t.mT.contiguous().mT if t.dim() > 1 else t),
        memory.map(lambda t: t.repeat_interleave(2, 0)[::2]),
        memory.map(lambda t: t.transpose(0, -1).contiguous().transpose(0, -1)),
    ):
        reader = model.reader(strided)
        another = model.reader(batch_size=rows)
        another.replace(list(range(rows)), strided)
        for found in (model(token, strided).logits, reader.read(token), another.read(token)):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@each
@pytest.mark.parametrize("length", [1, 3])
def test_vectors_that_are_not_finite_are_not_read(name: str, length: int) -> None:
    backbone = CASES[name].shared_model().backbone
    reader, other = (backbone.reader(None, 3) for _ in range(2))
    x = torch.ones(3, length, 8, dtype=torch.float64)
    for value in (float("nan"), float("inf")):
        wrong = x.clone()
        wrong[1, -1, 2] = value
        with pytest.raises(NonFiniteError, match="rows 1 are not finite, so no row was read"):
            reader.read(wrong)
    assert torch.equal(reader.read(x), other.read(x))
    assert reader.memory == other.memory


@each
def test_memories_are_equal_by_value(name: str) -> None:
    model = CASES[name].shared_model(torch.float32)
    memory = model(text(2, 3)).memory.detach()
    assert memory == memory.map(torch.clone)
    others = (
        memory[:1],
        memory.to("meta"),
        memory.reset([True, False]),
        CASES["lstm" if name != "lstm" else "gated"].shared_model().initial_memory(2),
        None,
    )
    for other in others:
        assert memory != other
    with pytest.raises(TypeError, match=r"has no hash, as its tensors may change: use a key"):
        hash(memory)


@each
def test_rows_are_pickled_without_the_others(name: str) -> None:
    """Each session of a batch is sent as large as it is."""
    memory = CASES[name].shared_model()(text(64, 3)).memory.detach()
    one = memory[3]
    for written in (pickle.dumps, _by_torch_in_bytes):
        assert len(written(one)) < len(written(memory.select([3]))) + 100
    assert copy.deepcopy(one).tokens_seen.untyped_storage().nbytes() == 8


def _by_torch_in_bytes(memory: Memory) -> bytes:
    file = io.BytesIO()
    torch.save(memory, file)
    return file.getvalue()


def test_a_graph_is_not_copied() -> None:
    memory = CASES["lstm"].shared_model()(text(1, 3)).memory
    with pytest.raises(MemspanError, match=r"part of a graph .*: copy memory\.detach\(\)"):
        copy.deepcopy(memory)
    leaf = memory.detach().map(lambda t: t.requires_grad_() if t.is_floating_point() else t)
    assert copy.deepcopy(leaf).output.requires_grad


def test_setting_fields_of_a_copy_is_refused_with_a_remedy() -> None:
    """Lightning copies a dataclass with its fields in ``memo``, and then sets them."""
    memory = LanguageModel(11, CASES[ONE_OF_EACH["transformer-xl"]].backbone).initial_memory(2)
    fields = memory.tensors()
    with pytest.raises(MemspanError, match=r"put memory\.tensors\(\), a dict, in its place"):
        copy.deepcopy(memory, {id(t): t for t in fields.values()})
    assert type(memory)(**fields) == memory


def test_a_checkpoint_is_loaded_before_any_model_is_made(tmp_path: Path) -> None:
    """As Lightning does: classes of memories have not been imported then."""
    for n, name in enumerate(ONE_OF_EACH.values()):
        torch.save(CASES[name].shared_model().initial_memory(2), tmp_path / f"{n:02}.pt")
    program = (
        "import sys, pathlib, torch; from memspan.models import LanguageModel\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).iterdir()): print(torch.load(path))"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for line, name in zip(shown.splitlines(), ONE_OF_EACH.values(), strict=True):
        assert line == repr(CASES[name].shared_model().initial_memory(2))


def test_pickles_of_other_memories_are_refused() -> None:
    memory = CASES["lstm"].shared_model().initial_memory(1)
    unpickled, (module, name, fields) = memory.__reduce_ex__(2)
    for given, said in (
        (
            (module, "LSTM", fields),
            "this is a memory of class memspan.models.lstm.model.LSTM: import",
        ),
        (("json", name, fields), "of class json.LSTMMemory: import json first"),
        ((module, name, {}), "a LSTMMemory has other fields than .*: load it with the version"),
        ((module, name, fields | {"cell": 1}), "a memory's cell must be a tensor, not 1"),
    ):
        with pytest.raises(MemspanError, match=said):
            unpickled(*given)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_makes_batches_of_memories(workers: int) -> None:
    memory = CASES["lstm"].shared_model()(text(3, 4)).memory.detach()
    rows = [{"memory": row, "tokens": torch.zeros(2)} for row in map(memory.__getitem__, range(3))]
    # Libraries of other tests change the default; spawn cannot pass rows that share their storage.
    start = "fork" if workers else None
    (batch,) = DataLoader(
        rows,  # type: ignore[arg-type]
        batch_size=3,
        num_workers=workers,
        multiprocessing_context=start,
    )
    assert batch["memory"] == memory
    with pytest.raises(MemspanError, match="concatenate takes a list of memories, not of 5"):
        concatenate(5)  # type: ignore[arg-type]
    with pytest.raises(MemspanError, match="concatenate needs memories of one model"):
        default_collate([memory, CASES["gated"].shared_model().initial_memory(1)])


def test_rows_are_picked_by_any_integer() -> None:
    memory = CASES["lstm"].shared_model()(text(3, 4)).memory.detach()
    for one in (1, -2, np.int64(1), np.array(1), torch.tensor(1), [1], np.array([1])):
        assert memory[one] == memory.select([1]), one
    assert memory[np.array([True, False, True])] == memory.select([0, 2])
    assert memory[range(2)] == memory[:2]
    for wrong in (None, True, torch.tensor(True), 1.0, [0.5], "1", [[0, 1]], (slice(2), 0), ...):
        with pytest.raises(MemspanError, match="picked by a number, a slice, a list of numbers or"):
            memory[wrong]
    with pytest.raises(MemspanError, match="list of numbers or one bool per row, not by slice"):
        memory[::-1]


@pytest.mark.hardening
@each
def test_file_objects_and_rows_of_files(name: str, tmp_path: Path) -> None:
    model = CASES[name].shared_model()
    file = io.BytesIO()
    path = tmp_path / "m.memory"
    memory = model(text(3, 4)).memory.detach()
    memory.save(file, model.fingerprint())
    memory.save(path, model.fingerprint())
    content = file.getvalue()
    assert content == path.read_bytes()
    with path.open("rb") as opened:
        assert model.load_memory(opened) == memory
    for place in (path, io.BytesIO(content)):
        with pytest.raises(
            MemspanError, match="3 rows of memory, and batch_size is 1: leave it out"
        ):
            model.load_memory(place, batch_size=1)
    for damaged, said in (
        (content[:-1], "the file object is damaged, or not a safetensors file"),
        (content[:-1] + bytes([content[-1] ^ 1]), "the file object is damaged .its checksum"),
        (b"", "the file object is damaged, or not"),
    ):
        with pytest.raises(MemspanError, match=said):
            model.load_memory(io.BytesIO(damaged))
    for place, said in (
        (content, "not from a bytes: for bytes, give io.BytesIO"),
        (None, "a None"),
    ):
        with pytest.raises(MemspanError, match=said):
            model.load_memory(place)  # type: ignore[arg-type]
    for unwritable in (io.StringIO(), None, io.BufferedReader(io.BytesIO())):
        with pytest.raises(MemspanError, match=r"cannot be written to .* in binary mode"):
            memory.save(unwritable, "")  # type: ignore[arg-type]


@each
def test_padding_may_hold_anything(name: str) -> None:
    """Ids outside the vocabulary, too, and as targets."""
    model = CASES[name].shared_model()
    lengths = [4, 0, 2]
    tokens = text(3, 4)
    memory = model(text(3, 4)).memory
    for padding in ("right", "left"):
        own = torch.arange(4) < torch.tensor(lengths)[:, None]
        own = own if padding == "right" else own.flip(1)
        found = [
            model(tokens.where(own, n), memory, lengths=given, padding=padding, targets=targets)
            for n, given in ((0, torch.tensor(lengths)), (-1, lengths), (10**9, lengths))
            for targets in (None, tokens.where(own, n))
        ]
        for scored in (0, 1):
            first, *others = found[scored::2]
            for other in others:
                assert other.memory == first.memory
                assert torch.equal(
                    *(out.losses if scored else out.logits for out in (first, other))
                )
    with pytest.raises(MemspanError, match="token -1 in row 1, column 0 is not in the vocabulary"):
        model(torch.tensor([[0], [-1]]), lengths=[1, 1])
    hidden = torch.zeros(3, 4, 8, dtype=torch.float64)
    for wrong, said in (
        ([4, 1], r"must be integers .3., the tokens of each row, not int64 \[2\]"),
        ([5, 1, 1], "must lie in 0 .. 4"),
        (3, "must be integers .3., the tokens of each row, not int64"),
        (["a"], "must be integers .3., the tokens of each row, not"),
    ):
        for read in (partial(model, tokens), partial(model.backbone, hidden)):
            with pytest.raises(MemspanError, match=f"lengths {said}"):
                read(lengths=wrong)
