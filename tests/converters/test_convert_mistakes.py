"""What cannot be converted: one line that names the file and what to do, and nothing is left behind."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import memspan
from memspan.converters.kinds import KINDS, KindName
from memspan.converters.torch_files import OLD, read
from memspan.errors import MemspanError
from memspan.runs import checkpoints
from transfo_xl_folder import OPTIONS, random_tensors, vocabulary

pytestmark = pytest.mark.hardening
Edit = Callable[[Path], object]


def config(**changes: Any) -> Edit:
    """The same tensors with other options."""
    return lambda folder: (folder / "config.json").write_text(json.dumps(OPTIONS | changes))


def vocab(value: object) -> Edit:
    return lambda folder: (folder / "vocab.pkl").write_bytes(pickle.dumps(value))


def tensors(changed: dict[str, Any], gone: str = "nothing") -> Edit:
    """Other tensors with the same options."""
    found: dict[str, Any] = random_tensors(OPTIONS) | changed
    kept = {name: tensor for name, tensor in found.items() if gone not in name}
    return lambda folder: torch.save(kept, folder / "pytorch_model.bin")


def drop(name: str) -> Edit:
    return lambda folder: (folder / name).unlink()


class Hostile:
    """Unpickling it makes a file."""

    def __reduce__(self) -> object:
        return Path.touch, (Path("ran"),)


MISTAKES: dict[str, tuple[Edit, str]] = {
    "no config": (drop("config.json"), "one of these files must be in it: config.json"),
    "no weights": (drop("pytorch_model.bin"), "put model.safetensors or pytorch_model.bin"),
    "BERT": (config(model_type="bert"), "of type 'bert'.*--from authors or --from labml"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
    "text for a number": (config(n_layer="2"), r"^[^:]*config.json: n_layer must be an integer"),
    "a number beyond numbers": (config(dropout=10**400), "dropout must be a number"),
    "other width": (config(d_inner=12), r"CoreNet.0.weight is \[10, 8\], .* needs \[12, 8\]"),
    "layers by the billion": (config(n_layer=10**9), "too few for 1,000,000,000 layers"),
    "a width beyond tensors": (config(d_model=2**62), "sizes that no tensor can have"),
    "a vocabulary that differs": (vocab(vocabulary(19)), "19 words, and the model 20 embeddings"),
    "the same word twice": (vocab({"idx2sym": ["a"] * 20}), "same word twice"),
    "half a character": (vocab({"idx2sym": ["\ud800"]}), "not text"),
    "a hostile vocabulary": (vocab(Hostile()), "holds pathlib.* could run a program"),
    "a hostile vocab.bin": (
        lambda f: (torch.save(Hostile(), f / "vocab.bin"), (f / "vocab.pkl").unlink()),
        "could run a program",
    ),
    "hostile weights": (tensors({"x": Hostile()}), r"holds \w+\.\w+, .* could run a program"),
    "a tensor left over": (tensors({"score": torch.zeros(2)}), "options lacks: score"),
    "a tensor missing": (tensors({}, "crit.cluster_bias"), "lacks crit.cluster_bias"),
    "a sparse tensor": (
        tensors({"x": torch.zeros(2).to_sparse()}),
        "holds torch._utils._rebuild_sparse_tensor, .* nor a dense tensor",
    ),
    "tensors that overlap": (
        tensors(dict.fromkeys("abcdefgh", torch.zeros(9000))),
        "bytes, and its tensors would be .* save each by itself",
    ),
    "tensors left out": (
        lambda f: (tensors({}, "CoreNet")(f), config(d_inner=10**9)(f)),
        "has no transformer.layers.0.pos_ff|lacks transformer.layers.0.pos_ff.CoreNet.0.weight",
    ),
    "ties that do not hold": (
        tensors({"crit.out_layers.0.weight": torch.zeros(20, 8)}),
        "crit.out_layers.0.weight differs from another tensor",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(
    mistake: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    edit, line = MISTAKES[mistake]
    edit(source)
    with pytest.raises(MemspanError, match=line):
        memspan.convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "ran").exists(), "it ran"


def test_folders(source: Path, tmp_path: Path) -> None:
    for name, out, line in (
        (
            "transfo-xl/transfo-xl-wt103",
            "out",
            "does not download checkpoints: put the files into a",
        ),
        (tmp_path, "out", "not a checkpoint that memspan knows"),
        (source, "source", "exists already: choose another folder"),
    ):
        with pytest.raises(MemspanError, match=line):
            memspan.convert(name, tmp_path / out)
    with pytest.raises(MemspanError, match="there is no kind of checkpoints 'bert'"):
        memspan.convert(source, tmp_path / "out", kind="bert")  # type: ignore[arg-type]
    assert set(KINDS) == set(get_args(KindName))


@pytest.mark.parametrize(
    ("method", "name", "line"),
    [
        (zipfile.ZIP_DEFLATED, "archive/extra", "is compressed, which torch.save never does"),
        (zipfile.ZIP_STORED, "archive/constants.pkl", "is a TorchScript program"),
    ],
)
def test_archives(method: int, name: str, line: str, source: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(source / "pytorch_model.bin", "a", method) as file:
        file.writestr(name, "more")
    with pytest.raises(MemspanError, match=line):
        memspan.convert(source, tmp_path / "out")


def test_a_run_that_cannot_be_written_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemspanError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save", full)
        with pytest.raises(MemspanError, match="the disk is full"):
            memspan.convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    memspan.convert(source, tmp_path / "out")


def tarred() -> bytes:
    """An archive that begins as files of torch before version 1.6, which were tar archives once."""
    content = io.BytesIO()
    with tarfile.open(
        fileobj=content, mode="w", format=tarfile.USTAR_FORMAT, encoding="latin-1"
    ) as file:
        file.addfile(tarfile.TarInfo(OLD.decode("latin-1") + "N.N.N.N."))
    return content.getvalue()


HOSTILE_PICKLES = {
    "a tar archive": tarred(),
    "protocol 0": b"cos\nsystem\n(S'touch ran'\ntR.",
    "a persistent id": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "an attribute of a helper": b"cre\n_compile.__globals__\n.",
    "a state for a dict": b"}}b.",
    "a deep tuple as a key": b"}" + b")" + b"\x85" * 50_000 + b"Ns.",
    "empty dicts by the million": b"}" * (1 << 24) + b".",
    "numbers by the million": b"K\x00" * (1 << 23) + b".",
    "a class that is changed": b"ccollections\nOrderedDict\n(N}S'update'\nNs\x86b.",
}


@pytest.mark.parametrize("what", HOSTILE_PICKLES)
def test_hostile_pickles(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "vocab.pkl"
    path.write_bytes(HOSTILE_PICKLES[what])
    start = time.process_time()
    with pytest.raises(MemspanError):
        read(path)
    assert time.process_time() - start < 3
    assert os.listdir(tmp_path) == ["vocab.pkl"]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_pickles(protocol: int, tmp_path: Path) -> None:
    """Plain data of every protocol comes back as it was; what holds itself does, too."""
    value = {"a": [1, -2, 3.5, None, True, "é\n"], 2**70: {}, None: (1, (2,), ()), "n": "x" * 300}
    path = tmp_path / "vocab.pkl"
    path.write_bytes(pickle.dumps([value, value], protocol=protocol))
    assert read(path) == [value, value]
    path.write_bytes(pickle.dumps(vocabulary(300), protocol=protocol))
    assert read(path) == vocabulary(300)
