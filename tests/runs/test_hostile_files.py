"""Files of which any byte may be another's: they load or are refused in one line, and nothing else."""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load, save

import hostile
from fuzz import KINDS
from memspan.errors import MemspanError
from memspan.files.disk import read_limited, write_atomically
from memspan.lab.commands.train import new_folder
from memspan.lab.data.options import DataConfig
from memspan.lab.data.tokenizers.registry import load_tokenizer
from memspan.lab.runs import options as run_options
from memspan.lab.runs.options import RunConfig
from memspan.lab.training import metrics
from memspan.models.registry import MODELS
from memspan.models.transformer_xl.config import TransformerXLConfig

# One worker makes the files.
pytestmark = [pytest.mark.hardening, pytest.mark.xdist_group("hostile files")]
Readers = dict[str, hostile.Reader]
EXAMPLES = hypothesis.settings(max_examples=20)


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Readers]:
    root = tmp_path_factory.mktemp("hostile")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMSPAN_CACHE", str(root / "cache"))
        patch.chdir(root)
        yield hostile.make_readers()


@st.composite
def edits(draw: st.DrawFn, content: bytes) -> bytes:
    """``content`` with a few bytes changed, taken out, put in or repeated."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        n = draw(st.integers(1, 64))
        some = draw(st.binary(min_size=1, max_size=8))
        rest = content[at:]
        edited = (some + rest[len(some) :], b"", rest[n:], some + rest, rest[:n] * 2 + rest)
        content = content[:at] + draw(st.sampled_from(edited))
    return content


SIZES = st.integers() | st.sampled_from([10**18, -1, 1 << 63, 1 << 40])
VALUES = st.recursive(
    st.booleans() | SIZES | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize("kind", KINDS)
def test_valid_files_and_those_that_once_took_all_memory(readers: Readers, kind: str) -> None:
    """In time: the test as a whole is one of seconds."""
    reader = readers[kind]
    for content in (reader.valid, *reader.others):
        assert reader(content) == ""
    for content in reader.refused:
        assert reader(content)


@pytest.mark.parametrize("kind", KINDS)
@EXAMPLES
@given(data=st.data())
def test_any_bytes_load_or_are_refused(readers: Readers, kind: str, data: st.DataObject) -> None:
    reader = readers[kind]
    valid = data.draw(st.sampled_from((reader.valid, *reader.others)))
    reader(data.draw(st.binary(max_size=64) | edits(valid)))


@EXAMPLES
@given(data=st.data())
def test_any_options_load_or_are_refused(readers: Readers, data: st.DataObject) -> None:
    lines = readers["preset"].valid.decode().splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    key = data.draw(st.sampled_from([lines[at].split(" =")[0], "out", "help", "resume"]))
    lines[at] = f"{key} = {json.dumps(data.draw(VALUES))}"
    for kind in ("preset", "config"):
        readers[kind]("\n".join(lines).encode("utf-8", "surrogatepass"))


TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.uint8)


@EXAMPLES
@given(data=st.data())
def test_any_tensors_load_or_are_refused(readers: Readers, data: st.DataObject) -> None:
    """Tensors of other names, types, sizes and values, rightly sealed."""
    for kind in ("memory", "weights", "training"):
        readers[kind](data.draw(retensored(readers[kind].valid)))


def metadata(content: bytes) -> dict[str, str]:
    """Damage to a file of tensors."""
    size = struct.unpack("<Q", content[:8])[0]
    return dict(json.loads(content[8 : 8 + size])["__metadata__"])


@st.composite
def retensored(draw: st.DrawFn, content: bytes) -> bytes:
    tensors = load(content)
    name = draw(st.sampled_from(sorted(tensors)))
    old = tensors.pop(name)
    shape = draw(st.lists(st.integers(0, 5), max_size=5))
    value = draw(st.sampled_from([-1, 3, 1 << 40, (1 << 63) - 1, -(1 << 63)]))
    changed: list[dict[str, torch.Tensor]] = [
        {name: old.to(draw(st.sampled_from(TYPES)))},
        {name: torch.zeros(shape, dtype=old.dtype)},
        {name: torch.full_like(old, value % 255 if old.dtype == torch.uint8 else value)},
        {},
        {name: old, draw(st.text(max_size=5)): old.clone()},
    ]
    return save(tensors | changed[draw(st.integers(0, 4))], metadata(content))


def test_counts_beyond_a_memorys_slots_are_refused(readers: Readers) -> None:
    reader = readers["memory"]
    tensors = load(reader.valid)
    header = metadata(reader.valid)
    counts = [n for n in tensors if "length" in n or n == "tokens_seen"]
    assert counts
    for name in counts:
        for value in (-1, (1 << 62) + 1):
            spoilt = {name: torch.full_like(tensors[name], value)}
            said = reader(save(tensors | spoilt, header))
            assert f"{name} must be int64 [1], in 0 .. " in said
    twice = {n: torch.cat([t, t]) for n, t in tensors.items()}
    assert "the reader has 2 rows, and the tokens have 1" in reader(save(twice, header))


def test_sizes_that_are_only_claimed_take_no_memory(readers: Readers) -> None:
    config = readers["config"]
    for option in (b"n_layers = 1", b"d_model = 8", b"d_ff = 8"):
        claim = option[:-1] + b"1000000000000"
        assert "do not fit its config.toml" in config(config.valid.replace(option, claim))
    start = b'{"x":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}'
    assert readers["weights"](struct.pack("<Q", len(start)) + start)


@pytest.mark.parametrize(
    "line",
    [
        'out = "/elsewhere"',
        "help = true",
        'tyro-write-completion = ["bash", "/elsewhere"]',
        '[data]\n"corpus=x --out" = "/elsewhere"',
        '[embedding]\ncutoffs = ["--out=/elsewhere"]',
        "[data.corpus]\nx = 1",
        "data = 3",
        "x = " + "[" * 5000,
        "train.steps." + ".".join("a" * 8_000) + " = 1",
        "x" * 17_000,
        "[train]\nsteps = " + "9" * 5000,
    ],
)
def test_a_preset_sets_options_and_nothing_else(line: str, tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(line)
    with pytest.raises(MemspanError, match=r"p\.toml"):
        run_options.read_config(path)


@given(corpus=st.text(max_size=300))
def test_names_of_corpora_cannot_leave_the_runs_folder(corpus: str) -> None:
    for name in (corpus, f"../{corpus}", f"/{corpus}/..", f"..\\{corpus}"):
        try:
            folder = new_folder(RunConfig(model=TransformerXLConfig(), data=DataConfig(name)))
        except MemspanError:
            assert not name.isprintable()
            continue
        assert folder.parent == Path("runs")
        assert folder.name.startswith("transformer-xl-")
        assert len(os.fsencode(folder.name)) < 256


@given(corpus=st.text(max_size=30))
@example(corpus="--out=/elsewhere")
@example(corpus="\N{GRINNING FACE}")
def test_config_toml_holds_any_name(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    try:
        options: RunConfig[Any] = RunConfig(model=TransformerXLConfig(), data=DataConfig(corpus))
    except MemspanError:
        return
    path = tmp_path_factory.mktemp("toml") / "config.toml"
    path.write_bytes(run_options.to_toml(options).encode())
    assert run_options.read_config(path) == options


def test_special_files_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(MemspanError, match="not a regular file"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.toml").symlink_to("/dev/zero")
    with pytest.raises(MemspanError, match="has no config"):
        run_options.load_config(tmp_path)
    (tmp_path / "large").write_bytes(bytes(11))
    with pytest.raises(OSError, match="larger than 10 bytes"):
        read_limited(tmp_path / "large", 10)


def test_nothing_is_written_through_links(tmp_path: Path) -> None:
    run = tmp_path / "run"
    precious = tmp_path / "precious"
    run.mkdir()
    precious.write_text("mine")
    (run / f".file.{os.getpid()}-{threading.get_native_id()}.tmp").symlink_to(precious)
    write_atomically(run / "file", b"new")
    assert (run / "file").read_bytes() == b"new"
    assert precious.read_text() == "mine"


def test_records_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    lines = [
        '{"step": 1, "tokens": 5, "train_bits_per_byte": NaN}',
        '{"step": 2, "train_bits_per_byte": 1.0}',
        '{"step": 3, "tokens": "many"}',
        '{"step": true}',
        '{"step": 4, "tokens": ' + "9" * 30 + "}",
        '{"step": ' + "9" * 5000 + "}",
        "[" * 100_000,
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert [r["step"] for r in metrics.read(tmp_path / "metrics.jsonl")] == [1, 2]
    metrics.plot(tmp_path, MODELS["compressive"].plots)
