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
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

import memspan
import transfo_xl_folder as peers
from memspan.converters import authors, torch_files, transfo_xl
from memspan.converters.vocabulary import read_vocabulary
from memspan.data.corpora import load_corpus
from memspan.data.options import DataConfig
from memspan.data.prepared import prepare
from memspan.data.tokenizers.registry import load_tokenizer, train_tokenizer
from memspan.errors import MemspanError
from memspan.files.disk import cache_folder
from memspan.models.transformer_xl.config import TransformerXLConfig
from memspan.runs import checkpoints, history
from memspan.runs import run as runs
from memspan.runs.checkpoint_files import check_fit
from memspan.runs.options import RunConfig, read_config, to_toml
from memspan.training import metrics, start
from memspan.training.options import TrainConfig
from memspan.training.state import TrainingState
from memspan.training.updates import Updater

TEXT = ("memory is what remains of what was read; " * 40 + "\n") * 2


@contextlib.contextmanager
def forged_checksums() -> Iterator[None]:
    """Inside, every file's checksum is right, so that what stands behind the check is reached.

    A checksum keeps out accidents, not authors of files.
    """

    def forged(*_: object) -> SimpleNamespace:
        return SimpleNamespace(
            update=lambda content: None, hexdigest=lambda: "0" * 64, digest=lambda: bytes(32)
        )

    with mock.patch.object(hashlib, "sha256", forged):
        yield


@dataclass(frozen=True)
class Reader:
    """A kind of file: a valid one, and what reads it (raises MemspanError or nothing)."""

    path: Path
    valid: bytes
    read: Callable[[], object]
    refused: tuple[bytes, ...] = ()
    """Contents that took gigabytes, hung or crashed in earlier versions; they are refused."""
    others: tuple[bytes, ...] = ()
    """More valid contents."""

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


@forged_checksums()
def make_readers(root: Path) -> dict[str, Reader]:
    """All kinds, in ``root``, which must be the current folder and hold the cache."""
    text, packed, run = root / "text.txt", root / "records.jsonl.gz", root / "run"
    preset, records = root / "preset.toml", run / "metrics.jsonl"
    tokenizers, memory = root / "tokenizer.json", root / "read.memory"
    lines = json.dumps({"text": TEXT}).encode() + b"\n"
    text.write_text(TEXT)
    options: RunConfig[Any] = RunConfig(
        model=TransformerXLConfig(n_layers=1, d_model=8, n_heads=2, d_ff=8, memory_length=4),
        data=DataConfig(corpus=str(text)),
        train=TrainConfig(
            steps=2, batch_size=2, segment_length=4, evaluate_tokens=16, save_every=1,
            sample_tokens=0, device="cpu",
        ),
    )  # fmt: skip
    with mock.patch.object(metrics, "plot", return_value=[]):
        start.train(options, run)
    newest = run / "checkpoints" / "step-00000002"
    loaded = memspan.load(run)
    model, prepared = loaded.model, prepare(str(text), "bytes")
    reader = model.reader(model.initial_memory(1))
    reader.read(torch.tensor([[1, 2, 3]]))
    reader.memory.save(memory, model.fingerprint())
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

    def read_records() -> None:
        # With forged checksums all contents would be one entry of the cache.
        shutil.rmtree(cache_folder() / "texts", ignore_errors=True)
        load_corpus(str(packed))

    def read_weights() -> None:
        # The options are another kind of file, and take longer to read than all else.
        with mock.patch.object(runs, "load_config", return_value=options):
            memspan.load(run)

    def read_checkpoint() -> None:
        """All of resuming but the training."""
        saved = checkpoints.latest(run).load()
        check_fit(run, options, prepared.tokenizer.vocab_size, saved.weights)
        state = TrainingState(options, prepared, torch.device("cpu"))
        state.restore(saved, run)
        Updater(state).update()

    def read_metrics() -> None:
        assert all(type(r["step"]) is int for r in metrics.read(records))

    def read_history() -> None:
        history.made(history.read(run), "0" * 64)
        checkpoints.latest(run).load()

    peer = peers.write(root / "peer", peers.OPTIONS, peers.random_tensors(peers.OPTIONS))
    their_model, old = _authors_model(root / "theirs"), torch_files.OLD
    past = history.content([history.Change(1, {"train.steps": [1, 2]}, "0" * 64, "0" * 64)])
    (run / history.NAME).write_bytes(past)
    preset.write_text(to_toml(options))
    packed.write_bytes(gzip.compress(lines * 9, mtime=0))
    tokenizers.write_bytes(kinds[0])
    # The published weights are another name of the best checkpoint's: each is damaged alone.
    published = run / "model.safetensors"
    content = published.read_bytes()
    published.unlink()
    published.write_bytes(content)

    def reader_of(path: Path, read: Callable[[], object], *refused: bytes) -> Reader:
        return Reader(path, path.read_bytes(), read, refused)

    tokenizer = reader_of(tokenizers, read_tokenizer)
    return {
        "preset": reader_of(preset, lambda: read_config(preset)),
        "config": reader_of(run / "config.toml", lambda: memspan.load(run)),
        "history": reader_of(run / history.NAME, read_history),
        "weights": reader_of(published, read_weights),
        "state": reader_of(newest / "state.json", read_checkpoint),
        "training": reader_of(newest / "training.safetensors", read_checkpoint),
        "metrics": reader_of(records, read_metrics),
        "memory": reader_of(memory, read_memory),
        "tokenizer": dataclasses.replace(tokenizer, others=tuple(kinds[1:])),
        "records": reader_of(
            packed,
            read_records,
            *(gzip.compress(b"[" + b"[]," * 6_000_000), gzip.compress(b"[" * 100_000)),
        ),
        "peer's options": reader_of(peer / "config.json", lambda: transfo_xl.read(peer)),
        "peer's weights": reader_of(peer / "pytorch_model.bin", lambda: transfo_xl.read(peer)),
        "peer's vocabulary": reader_of(
            peer / "vocab.pkl",
            lambda: read_vocabulary(peer, peers.OPTIONS["vocab_size"]),
            # A place in the memo, and a length, of gigabytes; dicts.
            b"\x80\x02Nr\xff\xff\xff\xff0Y.",
            b"\x80\x04\x8d" + b"\xff" * 7 + b"\x00x.",
            b"}" * (1 << 20) + b".",
        ),
        "peer's model": reader_of(
            their_model,
            lambda: authors.read(their_model.parent),
            old + b"\x80\x02M\xe9\x03.\x80\x02}.\x80\x02(" + b"NQ" * 99_999 + b".",
        ),
    }


def _authors_model(folder: Path) -> Path:
    """A state dict with the options beside it, as torch saved it before version 1.6."""
    options = peers.OPTIONS | {"cutoffs": [], "untie_r": False}
    tensors = peers.random_tensors(options).items()
    state = {name.removeprefix("transformer."): tensor for name, tensor in tensors}
    folder.mkdir()
    path, saved = folder / "model.pt", {"model_state": state, "model_config": options}
    torch.save(saved, path, _use_new_zipfile_serialization=False)
    return path
