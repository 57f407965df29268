"""Checkpoints that cannot be converted get one line with the file and a remedy, and leave nothing."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest
import torch

import memspan
from memspan.errors import MemspanError
from memspan.lab.converters.kinds import KINDS, KindName
from memspan.lab.converters.torch_files import read
from memspan.lab.runs import checkpoints
from memspan.lab.runs.folder import lock_run
from transfo_xl_folder import OPTIONS, random_tensors, vocabulary

pytestmark = pytest.mark.hardening
Edit = Callable[[Path], object]
WEIGHTS = "pytorch_model.bin"


def put(name: str, content: bytes) -> Edit:
    return lambda folder: (folder / name).write_bytes(content)


def config(**changes: Any) -> Edit:
    """The same tensors with other options."""
    return put("config.json", json.dumps(OPTIONS | changes).encode())


def vocab(value: object) -> Edit:
    return put("vocab.pkl", pickle.dumps(value))


def tensors(more: dict[str, Any], without: str = "^$") -> Edit:
    """Other tensors with the same options: more of them, or none whose name has that pattern."""
    kept = {n: t for n, t in random_tensors(OPTIONS).items() if not re.search(without, n)}
    return lambda folder: torch.save(kept | more, folder / WEIGHTS)


def bias(value: torch.Tensor) -> Edit:
    """The same tensors, but for one."""
    return tensors({"crit.cluster_bias": value})


def drop(name: str) -> Edit:
    return lambda folder: (folder / name).unlink()


def cut(name: str) -> Edit:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def pipe(name: str) -> Edit:
    """A named pipe, which nobody writes into."""

    def edit(folder: Path) -> None:
        # A vocabulary in text is read where there is no other.
        for old in {name, "vocab.pkl"} & set(os.listdir(folder)):
            (folder / old).unlink()
        os.mkfifo(folder / name)

    return edit


def deflate(folder: Path) -> None:
    old = zipfile.ZipFile(io.BytesIO((folder / WEIGHTS).read_bytes()))
    with zipfile.ZipFile(folder / WEIGHTS, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))


def claim_more(folder: Path) -> None:
    """A storage that is larger than its place in the file: what lies behind that is not read."""
    torch.save({"a": torch.zeros(1000)}, folder / WEIGHTS)
    content = (folder / WEIGHTS).read_bytes()
    # The number of values in the pickle: BININT2 1000.
    assert content.count(b"M\xe8\x03tq") == 1
    (folder / WEIGHTS).write_bytes(content.replace(b"M\xe8\x03tq", b"M\xe9\x03tq"))


class Hostile:
    """Unpickling it makes a file."""

    def __reduce__(self) -> object:
        return Path.touch, (Path("ran"),)


HEAD = "crit.out_layers.0.weight"
FEED_FORWARD = "transformer.layers.0.pos_ff.CoreNet.0.weight"
MISTAKES: dict[str, tuple[Edit, str]] = {
    "no config": (drop("config.json"), "one of these files must be in it: config.json"),
    "no weights": (drop(WEIGHTS), "put model.safetensors or pytorch_model.bin"),
    "BERT": (config(model_type="bert"), "of type 'bert'.*--from authors"),
    "no JSON": (put("config.json", b"{"), "not valid JSON"),
    "no object": (put("config.json", b"[]"), "config.json is not a JSON object"),
    "text for a number": (config(n_layer="2"), r"^[^:]*config.json: n_layer must be an integer"),
    "a number beyond numbers": (config(dropout=10**400), "dropout must be a number"),
    "a number for a flag": (config(pre_lnorm=2), "pre_lnorm must be true or false"),
    "other positions": (config(attn_type=1), "attn_type is 1"),
    "sampled softmax": (config(sample_softmax=9), "sample_softmax is 9"),
    "fixed span without memory": (config(same_length=True, mem_len=0), "memory_length"),
    "other width": (config(d_inner=10**7), r"0.weight is \[10, 8\], .* needs \[10000000, 8\]"),
    "layers too many": (config(n_layer=3), "lacks transformer.layers.2"),
    "layers by the billion": (config(n_layer=10**9), "too few for 1,000,000,000 layers"),
    "a width beyond tensors": (config(d_model=2**62), "sizes that no tensor can have"),
    "a huge vocabulary": (config(vocab_size=10**12), r"20 embed.* config.json .* 1000000000000"),
    "a vocabulary that differs": (vocab(vocabulary(19)), "19 words, and the model 20 embeddings"),
    "the same word twice": (vocab({"idx2sym": ["a"] * 20}), "same word twice"),
    "ids with a hole": (vocab({"sym2idx": {"a": 0, "b": 2}}), "ids in sym2idx"),
    "no words": (vocab({"counter": {}}), "neither sym2idx nor idx2sym"),
    "half a character": (vocab({"idx2sym": ["\ud800"]}), "not text"),
    "characters for words": (vocab(vocabulary(20) | {"delimiter": ""}), "has a delimiter"),
    "a case that is text": (vocab(vocabulary(20) | {"lower_case": "no"}), "lower_case is neither"),
    "a hostile vocabulary": (vocab(Hostile()), "holds pathlib.* could run a program"),
    "half a vocabulary": (cut("vocab.pkl"), "damaged, or neither a pickle"),
    "hostile weights": (tensors({"x": Hostile()}), r"holds \w+\.\w+, .* could run a program"),
    "half the weights": (cut(WEIGHTS), "damaged"),
    "no tensors": (tensors({"step": 3}), "not tensors by name"),
    "a tensor left over": (tensors({"score": torch.zeros(2)}), "options lacks: score"),
    "a tensor missing": (tensors({}, "cluster_bias"), "lacks crit.cluster_bias"),
    "a tensor of integers": (bias(torch.zeros(2).long()), "cluster_bias is of torch.int64"),
    "a sparse tensor": (bias(torch.zeros(2).to_sparse()), "_sparse_tensor, .* nor a dense tensor"),
    "one value for many": (bias(torch.zeros(1).expand(2)), "as it says .2 values of the 1"),
    "overlaps": (tensors(dict.fromkeys("abcdefgh", torch.zeros(9000))), "save each by itself"),
    "tensors left out": (
        lambda f: (tensors({}, "CoreNet.*(weight|0.bias)")(f), config(d_inner=10**9)(f)),
        f"lacks {FEED_FORWARD}",
    ),
    "a compressed member": (deflate, "is compressed, which torch.save never does"),
    "weights beyond float32": (bias(torch.zeros(2).double() + 1e300), "values .* beyond float32"),
    "ties that do not hold": (tensors({HEAD: torch.zeros(20, 8)}), f"{HEAD} differs from another"),
    "a storage beyond its member": (claim_more, "a is not in the file .* .1,001 values claimed"),
}


def twice(step: bytes, depth: int) -> bytes:
    """Each value is a ``step`` from the one before, which it takes from the memo, twice."""
    again = b"h\x00h\x00" + step
    return b")q\x00" + (again + b"q\x00") * depth


HOSTILE_PICKLES = {
    "protocol 0": b"cos\nsystem\n(S'touch ran'\ntR.",
    "an instance": b"(S'touch ran'\nios\nsystem\n.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "an attribute of a helper": b"cre\n_compile.__globals__\n.",
    "a state for a dict": b"}}b.",
    "a deep tuple as a key": b"}" + b")" + b"\x85" * 50_000 + b"Ns.",
    "a tuple that holds the one before twice": twice(b"\x86", 80) + b".",
    "such a tuple as a key": b"}" + twice(b"\x86", 80) + b"Ns.",
    "such a tuple in a set": b"\x80\x04(" + twice(b"\x86", 80) + b"\x91.",
    "a list that holds the one before twice": b"]q\x00" + b"](h\x00h\x00eq\x00" * 80 + b".",
    "a set as a key": b"\x80\x04}(K\x01K\x02\x91Ns.",
    "a list that is copied for ever": b"ccollections\nOrderedDict\nq\x00](K\x01K\x02\x86"
    + b"K\x01K\x02\x86" * 50
    + b"eq\x01\x85q\x02"
    + b"0h\x00h\x02R" * 100
    + b".",
    "colliding numbers in a set": b"\x80\x04\x8f("
    + b"".join(b"\x8a\x0c" + (n * (2**61 - 1)).to_bytes(12, "little") for n in range(99_999))
    + b"\x90.",
    "empty dicts by the million": b"}" * (1 << 24) + b".",
    "numbers by the million": b"K\x00" * (1 << 23) + b".",
    "a class that is changed": b"ccollections\nOrderedDict\n(N}S'update'\nNs\x86b.",
    "a number of a million digits": b"\x8b" + struct.pack("<i", 1 << 20) + bytes(1 << 20) + b".",
    "nothing": b"",
}
MISTAKES |= {
    f"a pickle: {what}": (put("vocab.pkl", content), "vocab.pkl (holds|is damaged)")
    for what, content in HOSTILE_PICKLES.items()
}
if hasattr(os, "mkfifo"):
    for file in ("config.json", WEIGHTS, "vocab.txt"):
        MISTAKES[f"a pipe for {file}"] = (pipe(file), "not a regular file")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_damaged_checkpoints_are_refused(
    mistake: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    edit, line = MISTAKES[mistake]
    edit(source)
    start = time.process_time()
    with pytest.raises(MemspanError, match=line):
        memspan.convert(source, tmp_path / "out")
    # Sizes that are only claimed are not made.
    assert time.process_time() - start < 10
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "ran").exists(), "it ran"


def test_folders_that_are_no_checkpoints_are_refused(source: Path, tmp_path: Path) -> None:
    """No folder, a folder that is taken, a run of ours."""
    with pytest.raises(MemspanError, match="does not download checkpoints: put the files"):
        memspan.convert("transfo-xl/transfo-xl-wt103", tmp_path / "out")
    assert set(KINDS) == set(get_args(KindName))
    run = memspan.convert(source, tmp_path / "deep" / "run")
    with pytest.raises(MemspanError, match="not a checkpoint that memspan knows"):
        memspan.convert(run, tmp_path / "out")
    with pytest.raises(MemspanError, match="exists already: choose another folder"):
        memspan.convert(source, tmp_path)
    with pytest.raises(MemspanError, match="as kind, not 'bert'"):
        memspan.convert(source, tmp_path / "out", kind="bert")  # type: ignore[arg-type]


def test_a_run_that_another_process_writes_is_kept(source: Path, tmp_path: Path) -> None:
    with lock_run(tmp_path / "out"), pytest.raises(MemspanError, match="another process"):
        memspan.convert(source, tmp_path / "out")
    assert (tmp_path / "out").is_dir()


def test_a_run_that_cannot_be_written_leaves_nothing(source: Path, tmp_path: Path) -> None:
    full = mock.patch.object(checkpoints, "save", side_effect=MemspanError("the disk is full"))
    with full, pytest.raises(MemspanError, match="the disk is full"):
        memspan.convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    memspan.convert(source, tmp_path / "out")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_reads_plain_pickles_of_every_protocol(protocol: int, tmp_path: Path) -> None:
    """Plain data of every protocol comes back as it was; what holds itself does, too."""
    value = {"a": [1, -2, 3.5, None, True, "é\n"], 2**70: {}, None: (1, (2,), ()), "n": "x" * 300}
    path = tmp_path / "vocab.pkl"
    path.write_bytes(pickle.dumps([value, value], protocol=protocol))
    assert read(path) == [value, value]
    path.write_bytes(pickle.dumps(vocabulary(300), protocol=protocol))
    assert read(path) == vocabulary(300)
