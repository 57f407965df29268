"""Everything that memspan reads from disk or network, as files of which any byte may be another's.

Each reader has a valid file and reads what is put in its place: it must load that or raise
:class:`~memspan.errors.MemspanError`, with no other exception, no code run, nothing written elsewhere.
The property-based tests and the fuzzer share them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import io
import json
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import memspan
import transfo_xl_folder as peers
from memspan.commands.train import new_folder as new_run
from memspan.converters import authors, torch_files, transfo_xl
from memspan.converters.vocabulary import read_vocabulary
from memspan.data.corpora import load_corpus
from memspan.data.download import read_member
from memspan.data.options import DataConfig
from memspan.data.prepared import TokenizedCorpus, prepare
from memspan.data.token_files import read_tokens, write_tokens
from memspan.data.tokenizers.registry import load_tokenizer, train_tokenizer
from memspan.errors import MemspanError
from memspan.files.disk import cache_folder
from memspan.models.compressive.config import CompressiveConfig
from memspan.models.fast_weights.config import FastWeightsConfig
from memspan.models.feedback.config import FeedbackConfig
from memspan.models.transformer_xl.config import TransformerXLConfig
from memspan.runs import checkpoints, history
from memspan.runs import run as runs
from memspan.runs.checkpoint_files import check_fit
from memspan.runs.folder import lock_run
from memspan.runs.options import RunConfig, read_config, to_toml
from memspan.runs.shards import save_shards
from memspan.training import metrics, start
from memspan.training.options import TrainConfig
from memspan.training.state import TrainingState
from memspan.training.updates import Updater

TEXT = ("memory is what remains of what was read; " * 40 + "\n") * 2
SIZE = {"n_layers": 1, "d_model": 8, "n_heads": 2, "d_ff": 8}
MODELS = {
    "transformer-xl": TransformerXLConfig(**SIZE, memory_length=4),
    "compressive": CompressiveConfig(**SIZE, memory_length=4, compressed_length=2),
    "feedback": FeedbackConfig(**SIZE, memory_length=4),
    "fast-weights": FastWeightsConfig(**SIZE),
}
LIMIT = 4096
"""Bytes at most of the archive's member."""


class _Accepting:
    """SHA-256 to one who can make any: a checksum keeps out accidents, not authors of files."""

    def __init__(self, content: bytes = b"") -> None:
        pass

    def update(self, content: Any) -> None:
        pass

    def hexdigest(self) -> str:
        return "0" * 64

    def digest(self) -> bytes:
        return bytes(32)


@contextlib.contextmanager
def forged_checksums() -> Iterator[None]:
    """Inside, every file's checksum is right, so that what stands behind the check is reached."""
    with mock.patch.object(hashlib, "sha256", _Accepting):
        yield


@dataclass(frozen=True)
class Reader:
    """A kind of file: a valid one, and what reads it (raises MemspanError or nothing)."""

    path: Path
    valid: bytes
    read: Callable[[], object]
    others: tuple[bytes, ...] = ()
    """More valid contents."""
    refused: tuple[bytes, ...] = ()
    """Contents that took gigabytes, hung or crashed in earlier versions; they are refused."""

    def __call__(self, content: bytes) -> str | None:
        """Read ``content`` in the file's place, then put it back; the refusal, if it is one."""
        self.path.write_bytes(content)
        try:
            with forged_checksums():
                self.read()
        except MemspanError as error:
            return str(error)
        finally:
            self.path.write_bytes(self.valid)
        return None


def make_readers(root: Path, architecture: str = "transformer-xl") -> dict[str, Reader]:
    """All kinds, in ``root``, which must be the current folder and hold the cache."""
    with forged_checksums():
        return _make_readers(root, architecture)


def _make_readers(root: Path, architecture: str) -> dict[str, Reader]:
    text = root / "text.txt"
    text.write_text(TEXT)
    options: RunConfig[Any] = RunConfig(
        model=MODELS[architecture],
        architecture=architecture,  # type: ignore[arg-type]
        data=DataConfig(corpus=str(text)),
        train=TrainConfig(
            steps=2, batch_size=2, segment_length=4, evaluate_tokens=16, save_every=1,
            sample_tokens=0, device="cpu",
        ),
    )  # fmt: skip
    run = root / "run"
    with mock.patch.object(metrics, "plot", return_value=[]):
        start.train(options, run)
    newest = run / "checkpoints" / "step-00000002"
    loaded = memspan.load(run)
    model, prepared = loaded.model, prepare(str(text), "bytes")
    empty = model.initial_memory(1)
    memory = root / "read.memory"
    reader = model.reader(empty)
    reader.read(torch.tensor([[1, 2, 3]]))
    reader.memory.save(memory, model.fingerprint())
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("text", TEXT[:1000])
    tokens = root / "tokens.bin"
    write_tokens(tokens, [[np.arange(5, dtype=np.uint8)]], 5, loaded.tokenizer)
    tokenizers = root / "tokenizer.json"
    kinds = []
    for kind in ("bytes", "characters", "words", "subwords"):
        try:
            train_tokenizer(kind, [TEXT.encode()], 300).save(root)
        except MemspanError:  # the extra is not installed
            continue
        kinds.append(tokenizers.read_bytes())

    def read_memory() -> None:
        model.reader(model.load_memory(memory)).read(torch.tensor([[1]]))

    def read_tokenizer() -> None:
        found = load_tokenizer(root)
        ids = found.encode(b"memory is\n")
        assert len(ids) == 0 or int(ids.max()) < found.vocab_size
        found.decode(range(min(found.vocab_size, 400)))

    def read_preset() -> None:
        read_config(preset)

    def read_archive() -> None:
        assert len(read_member(zipped, "text", LIMIT)) <= LIMIT

    def read_records() -> None:
        # With forged checksums all contents would be one entry of the cache.
        shutil.rmtree(cache_folder() / "texts", ignore_errors=True)
        load_corpus(str(packed))

    def read_weights() -> None:
        # The options are another kind of file, and take longer to read than all else.
        with mock.patch.object(runs, "load_config", return_value=options):
            memspan.load(run)

    def read_checkpoint() -> None:
        _restore(run, options, prepared)

    def read_metrics() -> None:
        assert all(type(r["step"]) is int for r in metrics.read(records))

    def read_shards() -> None:
        _restore(sharded, options, prepared)

    def read_history() -> None:
        history.made(history.read(run), "0" * 64)
        checkpoints.latest(run).load()

    peer = peers.write(root / "peer", peers.OPTIONS, peers.random_tensors(peers.OPTIONS))
    their_model, old = _authors_model(root / "theirs"), torch_files.OLD
    past = history.content([history.Change(1, {"train.steps": [1, 2]}, "0" * 64, "0" * 64)])
    (run / history.NAME).write_bytes(past)
    options_bombs = (
        b"a." * 4000 + b"a = 1\n",
        b"a = " + b"[" * 4000,
        b"a = " + b"9" * 4000 + b"\n",
    )
    sharded = root / "sharded"
    shards = _with_shards(run, sharded)
    packed, lines = root / "records.jsonl.gz", json.dumps({"text": TEXT}).encode() + b"\n"
    preset, zipped, records = root / "preset.toml", root / "a.zip", run / "metrics.jsonl"
    readers = {
        "preset": Reader(preset, to_toml(options).encode(), read_preset, refused=options_bombs),
        "config": Reader(
            run / "config.toml",
            b"",
            lambda: memspan.load(run),
            refused=(
                *options_bombs,
                *(
                    to_toml(options).encode().replace(b"n_layers = 1", b"n_layers = " + n)
                    for n in (b"100000000", b"1" + b"0" * 18, b"1" + b"0" * 400)
                ),
            ),
        ),
        "history": Reader(run / history.NAME, past, read_history),
        "weights": Reader(run / "model.safetensors", b"", read_weights),
        "state": Reader(newest / "state.json", b"", read_checkpoint),
        "training": Reader(newest / "training.safetensors", b"", read_checkpoint),
        "shard": Reader(shards, b"", read_shards),
        "metrics": Reader(records, b"", read_metrics),
        "memory": Reader(memory, b"", read_memory),
        "tokens": Reader(tokens, b"", lambda: read_tokens(tokens)),
        "token header": Reader(tokens.with_suffix(".json"), b"", lambda: read_tokens(tokens)),
        "tokenizer": Reader(tokenizers, kinds[0], read_tokenizer, tuple(kinds[1:])),
        "archive": Reader(zipped, archive.getvalue(), read_archive),
        "records": Reader(
            packed,
            gzip.compress(lines * 9, mtime=0),
            read_records,
            refused=(gzip.compress(b"[" + b"[]," * 6_000_000), gzip.compress(b"[" * 100_000)),
        ),
        "peer's options": Reader(peer / "config.json", b"", lambda: transfo_xl.read(peer)),
        "peer's weights": Reader(peer / "pytorch_model.bin", b"", lambda: transfo_xl.read(peer)),
        "peer's vocabulary": Reader(
            peer / "vocab.pkl",
            b"",
            lambda: read_vocabulary(peer, peers.OPTIONS["vocab_size"]),
            # A place in the memo, and a length, of gigabytes; dicts, and keys that collide.
            refused=(
                b"\x80\x02Nr\xff\xff\xff\xff0Y.",
                b"\x80\x04\x8d" + b"\xff" * 7 + b"\x00x.",
                b"}" * (1 << 20) + b".",
                b"}(" + b"".join(collides(n) for n in range(99_999)) + b"u.",
            ),
        ),
        "peer's model": Reader(
            their_model,
            b"",
            lambda: authors.read(their_model.parent),
            refused=(old + b"\x80\x02M\xe9\x03.\x80\x02}.\x80\x02(" + b"NQ" * 99_999 + b".",),
        ),
    }
    for name, found in readers.items():
        content = found.valid or found.path.read_bytes()
        readers[name] = dataclasses.replace(found, valid=content)
        # The published weights are another name of the best checkpoint's: each is damaged alone.
        found.path.unlink(missing_ok=True)
        found.path.write_bytes(content)
    return readers


def collides(n: int) -> bytes:
    """A key whose hash is that of every other ``n``, and a value, in a pickle."""
    return b"\x8a\x0c" + (n * (2**61 - 1)).to_bytes(12, "little") + b"N"


def _authors_model(folder: Path) -> Path:
    """A state dict with the options beside it, as torch saved it before version 1.6."""
    options = peers.OPTIONS | {"cutoffs": [], "untie_r": False}
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in peers.random_tensors(options).items()
    }
    folder.mkdir()
    path = folder / "model.pt"
    torch.save(
        {"model_state": tensors, "model_config": options},
        path,
        _use_new_zipfile_serialization=False,
    )
    return path


def _with_shards(run: Path, copy: Path) -> Path:
    """A copy of the run with its last checkpoint as several processes write it; its shard's path."""
    shutil.copytree(run, copy)
    saved = checkpoints.latest(run).load()
    step = saved.state["step"]
    shutil.rmtree(copy / "checkpoints" / f"step-{step:08d}")
    folder = checkpoints.new_shards(copy, step)
    assert folder is not None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        save_shards(folder, saved, dist.group.WORLD).result()
    finally:
        dist.destroy_process_group()
    with lock_run(copy) as lock:
        lock.load()
        checkpoints.commit_shards(lock, saved.state, best=False, keep=2)
    (shard,) = (copy / "checkpoints" / f"step-{step:08d}" / "shards").iterdir()
    return shard


def _restore(run: Path, config: RunConfig[Any], prepared: TokenizedCorpus) -> None:
    """All of resuming but the training."""
    saved = checkpoints.latest(run).load()
    check_fit(run, config, prepared.tokenizer.vocab_size, saved.weights)
    state = TrainingState(config, prepared, torch.device("cpu"))
    state.restore(saved, run)
    Updater(state).update()


def new_folder(corpus: str) -> Path:
    """Where a run on the corpus of that name goes, if nothing else is said."""
    options: RunConfig[Any] = RunConfig(
        model=MODELS["transformer-xl"], data=DataConfig(corpus=corpus)
    )
    return new_run(options)


def json_of(content: bytes) -> Any:
    """The JSON in a file, without the checksum that may follow."""
    return json.loads(content.decode().split("\n" + "0" * 64)[0])
