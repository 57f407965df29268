"""Everything that memspan reads from disk or network, as files of which any byte may be another's.

Each reader has a valid file and reads what is put in its place: it must load that or raise
:class:`~memspan.errors.MemspanError`, with no other exception, no code run, nothing written elsewhere.
The property-based tests and the fuzzer share them.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

import memspan
import tiny_runs
import transfo_xl_folder as peers
from memspan.errors import MemspanError
from memspan.files.disk import cache_folder
from memspan.lab.converters import authors, torch_files, transfo_xl
from memspan.lab.converters.vocabulary import read_vocabulary
from memspan.lab.data.corpora import load_corpus
from memspan.lab.data.prepared import prepare
from memspan.lab.data.tokenizers.registry import load_tokenizer, train_tokenizer
from memspan.lab.runs import checkpoints, history
from memspan.lab.runs import run as runs
from memspan.lab.runs.checkpoint_files import check_fit
from memspan.lab.runs.options import read_config, to_toml
from memspan.lab.training import metrics, start
from memspan.lab.training.state import TrainingState
from memspan.lab.training.updates import Updater

TEXT = tiny_runs.TEXT + "\n"


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


class Reader:
    """A kind of file: a valid one, and what reads it (raises MemspanError or nothing).

    ``refused``: contents that took gigabytes, hung or crashed in earlier versions; ``others``: more
    valid ones.
    """

    def __init__(
        self, path: str, read: Callable[[], object], *refused: bytes, others: Sequence[bytes] = ()
    ) -> None:
        self.path = Path(path).absolute()
        self.read = read
        self.refused = refused
        self.valid = self.path.read_bytes()
        self.others = others

    def __call__(self, content: bytes) -> str:
        """Read ``content`` in the file's place, then put it back; the refusal, or "" if none."""
        self.path.write_bytes(content)
        try:
            with forged_checksums():
                self.read()
        except MemspanError as error:
            return str(error)
        finally:
            self.path.write_bytes(self.valid)
        return ""


@forged_checksums()
def make_readers() -> dict[str, Reader]:
    """All kinds, in the current folder, which must hold the cache."""
    here = Path.cwd()
    run = here / "run"
    peer = here / "peer"
    Path("text.txt").write_text(TEXT)
    options = tiny_runs.options(steps=2, save_every=1)
    with mock.patch.object(metrics, "plot", return_value=[]):
        start.train(options, run)
    model = memspan.load(run).model
    prepared = prepare("text.txt", "bytes")
    reader = model.reader(model.initial_memory(1))
    reader.read(torch.tensor([[1, 2, 3]]))
    reader.memory.save(here / "read.memory", model.fingerprint())
    kinds = []
    for kind in ("bytes", "characters", "words", "subwords"):
        # Unless the extra is not installed.
        with contextlib.suppress(MemspanError):
            train_tokenizer(kind, [TEXT.encode()], 300).save(here)
            kinds.append(Path("tokenizer.json").read_bytes())

    def read_memory() -> None:
        model.reader(model.load_memory(here / "read.memory")).read(torch.tensor([[1]]))

    def read_tokenizer() -> None:
        found = load_tokenizer(here)
        ids = found.encode(b"memory is\n")
        assert len(ids) == 0 or int(ids.max()) < found.vocab_size
        found.decode(range(min(found.vocab_size, 400)))

    def read_records() -> None:
        # With forged checksums all contents would be one entry of the cache.
        shutil.rmtree(cache_folder() / "texts", ignore_errors=True)
        load_corpus(str(here / "records.jsonl.gz"))

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
        assert all(type(r["step"]) is int for r in metrics.read(run / "metrics.jsonl"))

    def read_history() -> None:
        history.made(history.read(run), "0" * 64)
        checkpoints.latest(run).load()

    peers.write(peer, peers.OPTIONS, peers.random_tensors(peers.OPTIONS))
    _write_authors_model(here / "theirs")
    past = history.content([history.Change(1, {"train.steps": [1, 2]}, "0" * 64, "0" * 64)])
    (run / history.NAME).write_bytes(past)
    Path("preset.toml").write_text(to_toml(options))
    Path("records.jsonl.gz").write_bytes(
        gzip.compress((json.dumps({"text": TEXT}) + "\n").encode() * 9, mtime=0)
    )
    Path("tokenizer.json").write_bytes(kinds[0])
    # The published weights are another name of the best checkpoint's: each is damaged alone.
    shutil.copyfile(run / "model.safetensors", here / "copy").replace(run / "model.safetensors")
    newest = "run/checkpoints/step-00000002"
    old = torch_files.OLD
    return {
        "preset": Reader("preset.toml", lambda: read_config(here / "preset.toml")),
        "config": Reader("run/config.toml", lambda: memspan.load(run)),
        "history": Reader("run/history.jsonl", read_history),
        "weights": Reader("run/model.safetensors", read_weights),
        "state": Reader(f"{newest}/state.json", read_checkpoint),
        "training": Reader(f"{newest}/training.safetensors", read_checkpoint),
        "metrics": Reader("run/metrics.jsonl", read_metrics),
        "memory": Reader("read.memory", read_memory),
        "tokenizer": Reader("tokenizer.json", read_tokenizer, others=kinds[1:]),
        "records": Reader(
            "records.jsonl.gz",
            read_records,
            *(gzip.compress(b"[" + b"[]," * 6_000_000), gzip.compress(b"[" * 100_000)),
        ),
        "peer's options": Reader("peer/config.json", lambda: transfo_xl.read(peer)),
        "peer's weights": Reader("peer/pytorch_model.bin", lambda: transfo_xl.read(peer)),
        "peer's vocabulary": Reader(
            "peer/vocab.pkl",
            lambda: read_vocabulary(peer, peers.OPTIONS["vocab_size"]),
            # A place in the memo, and a length, of gigabytes; dicts.
            b"\x80\x02Nr\xff\xff\xff\xff0Y.",
            b"\x80\x04\x8d" + b"\xff" * 7 + b"\x00x.",
            b"}" * (1 << 20) + b".",
        ),
        "peer's model": Reader(
            "theirs/model.pt",
            lambda: authors.read(here / "theirs"),
            old + b"\x80\x02M\xe9\x03.\x80\x02}.\x80\x02(" + b"NQ" * 99_999 + b".",
        ),
    }


def _write_authors_model(folder: Path) -> None:
    """A state dict with the options beside it, as torch saved it before version 1.6."""
    options = peers.OPTIONS | {"cutoffs": [], "untie_r": False}
    tensors = peers.random_tensors(options).items()
    state = {name.removeprefix("transformer."): tensor for name, tensor in tensors}
    saved = {"model_state": state, "model_config": options}
    folder.mkdir()
    torch.save(saved, folder / "model.pt", _use_new_zipfile_serialization=False)
