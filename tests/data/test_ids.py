"""Corpora of token ids, as NumPy saves them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import memspan
from command_line import SMALL, refused
from memspan.errors import MemspanError
from memspan.lab import cli
from memspan.lab.data.prepared import prepare
from memspan.lab.data.tokenizers.plain import IdTokenizer

pytestmark = pytest.mark.usefixtures("own_folders")
IDS = np.random.default_rng(0).integers(0, 300, 2000)


@pytest.mark.parametrize("dtype", [np.int64, np.uint16, np.dtype(">i4")])
def test_ids_become_tokens_as_they_are(dtype: np.dtype) -> None:
    np.save("a.npy", IDS.astype(dtype))
    prepared = prepare("a.npy", "ids")
    found = np.concatenate([split.tokens for split in prepared.splits.values()])
    assert (found == IDS).all()
    assert [len(split.tokens) for split in prepared.splits.values()] == [1800, 100, 100]
    assert prepared.tokenizer.vocab_size == IDS[:1800].max() + 1
    assert prepared.notices() == []


def test_each_file_of_a_folder_is_a_document() -> None:
    Path("songs").mkdir()
    for n in range(30):
        np.save(f"songs/{n}.npy", IDS[n : 2 * n + 1])
    np.save("a.npy", IDS)
    prepared = prepare({"train": "a.npy", "test": "songs"}, "ids", 512)
    assert len(prepared.splits["test"].document_starts) == 30
    assert prepared.tokenizer.vocab_size == 512


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (IDS.reshape(40, 50), r"a\.npy holds int64 \[40, 50\], not ids: save one row of integers"),
        (IDS.astype(np.float32), r"a\.npy holds float32 \[2000\], not ids"),
        (np.array(["a", "b"]), "holds <U1"),
        (np.array([3, -1, 2]), "has -1 at 1, which is not an id: ids are 0 to 16,777,215"),
        (np.array([3, 1 << 24]), "has 16777216 at 1, which is not an id"),
        (np.array([{}]), "not an array that numpy.save wrote"),
        (np.array([], dtype=np.int64), "is empty"),
    ],
)
def test_other_arrays_are_refused(array: np.ndarray, says: str) -> None:
    np.save("a.npy", array, allow_pickle=True)
    with pytest.raises(MemspanError, match=says) as refusal:
        prepare("a.npy", "ids")
    assert "\n" not in str(refusal.value)


def test_damaged_arrays_are_refused() -> None:
    np.save("a.npy", IDS)
    whole = Path("a.npy").read_bytes()
    for content in (whole[:-1], whole[:60], b"", b"\x93NUMPY\1\0\xff\xff" + b"[" * 60_000):
        Path("a.npy").write_bytes(content)
        with pytest.raises(MemspanError, match="not an array that numpy"):
            prepare("a.npy", "ids")


def test_ids_and_text_are_not_mixed_up() -> None:
    np.save("a.npy", IDS)
    with pytest.raises(MemspanError, match=r"holds ids, not text, .* --data\.tokenizer ids"):
        prepare("a.npy", "bytes")
    Path("b.txt").write_text("three words here " * 20)
    with pytest.raises(MemspanError, match="'three' is not an id"):
        prepare("b.txt", "ids")
    with pytest.raises(MemspanError, match=r"300 is not an id below 300: .*--data\.vocab-size"):
        IdTokenizer(300).encode(b"299 300")


def test_a_run_of_ids_trains_scores_and_writes(capsys: pytest.CaptureFixture[str]) -> None:
    np.save("a.npy", IDS)
    np.save("b.npy", IDS[:50])
    options = ["--data.corpus", "a.npy", "--data.tokenizer", "ids", "--data.vocab-size", "400"]
    cli.main(["train", *options, "--out", "run", *SMALL])
    run = memspan.load("run")
    assert run.tokenizer.vocab_size == 400
    scores = memspan.evaluate(run, "b.npy", split="all")
    assert (scores.tokens, scores.bits_per_byte) == (50, None)
    assert memspan.evaluate(run).as_in_training
    written = memspan.generate(run, "5 17 3", tokens=6)
    assert written.text.split() == [*map(str, written.tokens[0])]
    assert memspan.generate(run, tokens=3).tokens
    pieces = [piece for (piece,) in memspan.Writer(run, "5 17", tokens=4)]
    assert all(piece.startswith(" ") for piece in pieces)
    capsys.readouterr()
    assert "'hello' is not an id" in refused(capsys, "generate", "run", "--prompt", "hello")
