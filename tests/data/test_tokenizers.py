"""Tokenisers, token files, and the cache of tokenised corpora."""

from __future__ import annotations

import errno
import os
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memspan.errors import MemspanError
from memspan.lab.data.options import TOKENIZERS
from memspan.lab.data.prepared import prepare
from memspan.lab.data.token_files import read_tokens, write_tokens
from memspan.lab.data.tokenizers import registry
from memspan.lab.data.tokenizers.base import StreamDecoder
from memspan.lab.data.tokenizers.plain import ByteTokenizer, WordTokenizer
from memspan.lab.data.tokenizers.registry import KINDS, load_tokenizer, train_tokenizer

TEXT = "Grüße, the 世界 cat 🎉 sat on the mat.\n\nThe cat, it sat!\n" * 20


OF_TEXT = [kind for kind in TOKENIZERS if kind != "ids"]


@pytest.mark.parametrize("kind", OF_TEXT)
def test_a_text_is_prepared_encoded_and_decoded(kind: str, own_folders: Path) -> None:
    Path("t.txt").write_text(TEXT)
    prepared = prepare("t.txt", kind, 300 if kind == "subwords" else None)
    tokenizer = prepared.tokenizer
    text = TEXT.encode()
    assert sum(split.n_bytes for split in prepared.splits.values()) == len(text)
    train = prepared.splits["train"]
    begun = tokenizer.decode(train.tokens)
    assert text.startswith(begun)
    assert kind == "words" or train.n_bytes == len(begun)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert int(ids.max()) < tokenizer.vocab_size
    smallest = np.uint8 if tokenizer.vocab_size <= 256 else np.uint16
    assert ids.dtype == train.tokens.dtype == smallest
    tokenizer.save(own_folders)
    again = load_tokenizer(own_folders)
    assert again.vocabulary_hash == tokenizer.vocabulary_hash
    assert np.array_equal(again.encode(text), ids)
    decoder = StreamDecoder(tokenizer)
    assert "".join(decoder.push(int(i)) for i in ids) == TEXT


def test_unseen_characters_are_unknown_and_other_bytes_refused_with_their_place() -> None:
    tokenizer = train_tokenizer("characters", [b"abc"])
    assert tokenizer.encode("abz€".encode()).tolist() == [1, 2, 0, 0]
    for chunks in ([b"abc\xc3", b"\xa9c\xff", b"abc"], [b"abc", b"\xc3\xa9c\xc3"]):
        with pytest.raises(MemspanError, match=r"not UTF-8 \(byte 6\)"):
            list(tokenizer.encode_stream(chunks))


def test_words_are_ranked_and_limited() -> None:
    tokenizer = train_tokenizer("words", [b"a b a c a b <unk>\nd"], 5)
    assert isinstance(tokenizer, WordTokenizer)
    assert tokenizer.words[:2] == ["a", "b"]
    assert {"<eos>", "<unk>"} <= set(tokenizer.words)
    assert len(tokenizer.words) == 5
    assert train_tokenizer("words", [b"a a"], 2).decode([0, 1]) == b"\n<unk>"
    assert tokenizer.decode(tokenizer.encode(b"a b\nzebra a\n")) == b"a b\n<unk> a\n"


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    train_tokenizer("characters", [b"abcdef"]).save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace("abcdef", "abcdeg"))
    with pytest.raises(MemspanError, match="checksum"):
        load_tokenizer(tmp_path)
    path.write_text('{"tokenizer": {"kind": "pickle"}}')
    with pytest.raises(MemspanError, match="damaged"):
        load_tokenizer(tmp_path)
    with pytest.raises(MemspanError, match="missing"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_tokenizer_that_the_system_does_not_give_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, limit: int) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    monkeypatch.setattr(registry, "read_limited", refuse)
    with pytest.raises(MemspanError, match=r"cannot read .*tokenizer.json .* then try again"):
        load_tokenizer(tmp_path)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), st.binary())
def test_streamed_bytes_never_show_half_a_character(text: str, any_bytes: bytes) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(any_bytes)) == any_bytes
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push(int(i)) for i in tokenizer.encode(text.encode())]
    # A character comes with its last byte, and nothing comes before.
    assert pieces == [part for c in text for part in [""] * (len(c.encode()) - 1) + [c]]


@pytest.mark.parametrize("kind", OF_TEXT[1:])
def test_text_that_is_not_utf8_says_what_to_do(kind: str) -> None:
    with pytest.raises(MemspanError, match=r"--data\.tokenizer bytes"):
        train_tokenizer(kind, [b"good", b"\xe9t\xe9"])
    tokenizer = train_tokenizer(kind, [b"good"])
    with pytest.raises(MemspanError, match=r"--data\.tokenizer bytes"):
        tokenizer.encode(b"\xe9t\xe9")


def test_subwords_need_room_for_bytes_and_a_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A vocabulary has room for every byte; the library is an extra."""
    with pytest.raises(MemspanError, match="at least 256"):
        train_tokenizer("subwords", [b"abc"], 255)
    assert train_tokenizer("subwords", [b"abc " * 9], 256).vocab_size == 256
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MemspanError, match="pip install tokenizers"):
        train_tokenizer("subwords", [b"abc"])


@pytest.mark.parametrize("kind", OF_TEXT)
@given(st.text("ab'\t \r\n\u00a0\u2028\u3000é世1!.", max_size=300), st.integers(1, 40))
@example("ba" * 9, 4)
def test_pieces_change_neither_vocabulary_nor_tokens(kind: str, text: str, size: int) -> None:
    content = text.encode()
    chunks = [content[i : i + size] for i in range(0, len(content), size)]
    limit = 258 if kind == "subwords" else None
    tokenizer = train_tokenizer(kind, [content], limit)
    pieces = KINDS[kind].pieces(chunks)
    assert train_tokenizer(kind, pieces, limit).vocabulary_hash == tokenizer.vocabulary_hash
    ids = np.concatenate([np.empty(0, int), *tokenizer.encode_stream(chunks)])
    assert ids.tolist() == tokenizer.encode(content).tolist()


@pytest.mark.parametrize("kind", ["bytes", "characters"])
def test_a_long_text_is_prepared_in_pieces(kind: str, own_folders: Path) -> None:
    path = Path("t.txt")
    path.write_text("Grüße, naïve 世界 🎉: the cat sat on the mat.\n" * 200_000, encoding="utf-8")
    tracemalloc.start()
    try:
        prepared = prepare("t.txt", kind)
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


def test_prepare_uses_and_repairs_its_cache(own_folders: Path) -> None:
    Path("t.txt").write_text(TEXT)
    first = prepare("t.txt", "characters")
    tokens = first.splits["train"].tokens.copy()
    (path,) = Path("cache/tokens").glob("*/train.bin")
    made = path.stat().st_mtime_ns
    again = prepare("t.txt", "characters")
    assert path.stat().st_mtime_ns == made
    assert np.array_equal(again.splits["train"].tokens, tokens)
    path.write_bytes(b"x")
    repaired = prepare("t.txt", "characters")
    assert np.array_equal(repaired.splits["train"].tokens, tokens)
    other = prepare("t.txt", "bytes", with_tokenizer=first.tokenizer)
    assert other.tokenizer is first.tokenizer
