"""Token files, and the cache of prepared corpora."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from memspan.data.options import TOKENIZERS
from memspan.data.prepared import prepare
from memspan.data.token_files import read_tokens, write_tokens
from memspan.data.tokenizers.plain import ByteTokenizer
from memspan.errors import MemspanError

pytestmark = pytest.mark.usefixtures("own_folders")

TEXT = "Grüße, naïve 世界 🎉: the cat sat.\n" * 30


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_bytes_are_those_of_the_text_whatever_the_tokeniser(kind: str, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(TEXT, encoding="utf-8")
    prepared = prepare(str(tmp_path / "t.txt"), kind, 300 if kind == "subwords" else None)
    train = prepared.splits["train"]
    if kind != "words":
        assert train.n_bytes == len(prepared.tokenizer.decode(train.tokens))
    total = sum(split.n_bytes for split in prepared.splits.values())
    assert total == len(TEXT.encode())
    assert int(train.tokens.max()) < prepared.tokenizer.vocab_size
    assert train.tokens.dtype == prepared.tokenizer.dtype


@pytest.mark.parametrize("kind", ["bytes", "characters"])
def test_a_long_text_is_prepared_in_pieces(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("Grüße, naïve 世界 🎉: the cat sat on the mat.\n" * 200_000, encoding="utf-8")
    tracemalloc.start()
    try:
        prepared = prepare(str(path), kind)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(split.n_bytes for split in prepared.splits.values()) == path.stat().st_size > 1e7
    # The characters' own table takes 4.5 MB, whatever the text.
    assert most < (8e6 if kind == "characters" else 3e6)


def test_token_files_keep_tokens_and_documents(tmp_path: Path) -> None:
    documents = [np.array([1, 2, 3], np.uint8), np.array([], np.uint8), np.array([4], np.uint8)]
    write_tokens(tmp_path / "t.bin", [[(bytes(d), d)] for d in documents], ByteTokenizer())
    file = read_tokens(tmp_path / "t.bin")
    assert file.tokens.tolist() == [1, 2, 3, 4]
    assert file.document_starts.tolist() == [0, 3, 3]
    assert isinstance(file.tokens, np.memmap)


@pytest.mark.parametrize(
    ("suffix", "old", "new"),
    [
        (".bin", b"c", b""),
        (".bin", b"2", b"6"),
        (".json", b"{", b""),
        (".json", b'"n_bytes": 100', b'"n_bytes": 300'),
        (".json", b"memspan-tokens-", b"memspan-tokens-0"),
    ],
    ids=["truncated", "flipped", "header", "value", "older"],
)
def test_damaged_token_files_are_refused(
    tmp_path: Path, suffix: str, old: bytes, new: bytes
) -> None:
    path = tmp_path / "t.bin"
    write_tokens(path, [[(bytes(100), np.arange(100))]], ByteTokenizer())
    file = path.with_suffix(suffix)
    content = file.read_bytes()
    assert old in content
    file.write_bytes(content.replace(old, new))
    with pytest.raises(MemspanError, match=r"damaged .* prepare the corpus again"):
        read_tokens(path)
    file.unlink()
    with pytest.raises(MemspanError, match=rf"{suffix} is missing: .* prepare the corpus again"):
        read_tokens(path)


def test_prepare_uses_and_repairs_its_cache(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(TEXT)
    first = prepare("t.txt", "characters")
    tokens = first.splits["train"].tokens.copy()
    (path,) = (tmp_path / "cache/tokens").glob("*/train.bin")
    made = path.stat().st_mtime_ns
    again = prepare("t.txt", "characters")
    assert path.stat().st_mtime_ns == made
    assert np.array_equal(again.splits["train"].tokens, tokens)
    path.write_bytes(b"x")
    repaired = prepare("t.txt", "characters")
    assert np.array_equal(repaired.splits["train"].tokens, tokens)
    other = prepare("t.txt", "bytes", with_tokenizer=first.tokenizer)
    assert other.tokenizer is first.tokenizer
