"""Tokenisers as they stream and fail, token files' counts, and the cache of both."""

from __future__ import annotations

import json
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memspan.data.prepared import prepare
from memspan.data.token_files import read_tokens, write_tokens
from memspan.data.tokenizers import ByteTokenizer, tokenizer_class, train_tokenizer
from memspan.errors import MemspanError

TEXT = "Grüße, naïve 世界 🎉: the cat sat.\n" * 30


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSPAN_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", ["bytes", "characters", "words", "subwords"])
def test_bytes_are_those_of_the_text_whatever_the_tokeniser(kind: str, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(TEXT, encoding="utf-8")
    prepared = prepare(str(tmp_path / "t.txt"), kind, 300 if kind == "subwords" else None)
    train = prepared.splits["train"]
    text = prepared.tokenizer.decode(train.tokens)
    if kind != "words":
        assert train.n_bytes == len(text)
    total = sum(split.n_bytes for split in prepared.splits.values())
    assert total == len(TEXT.encode())
    assert train.kind == kind
    assert train.vocab_size == prepared.tokenizer.vocab_size
    assert int(train.tokens.max()) < train.vocab_size
    assert train.tokens.dtype == prepared.tokenizer.dtype


def test_files_of_an_older_format_are_made_again(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(TEXT, encoding="utf-8")
    first = prepare(str(tmp_path / "t.txt"), "characters")
    (path,) = (tmp_path / "cache/tokens").glob("*/train.json")
    header = json.loads(path.read_text())
    path.write_text(json.dumps(header | {"format": "memspan-tokens-1"}))
    with pytest.raises(MemspanError, match="damaged"):
        read_tokens(path.with_suffix(".bin"))
    again = prepare(str(tmp_path / "t.txt"), "characters")
    assert again.splits["train"].sha256 == first.splits["train"].sha256


@pytest.mark.parametrize(
    "header",
    ["[" * 100_000, "[]", "null", '{"format": "memspan-tokens-2", "dtype": "float64"}', "\xff"],
)
def test_headers_of_any_kind_are_refused_in_one_line(tmp_path: Path, header: str) -> None:
    path = tmp_path / "t.bin"
    write_tokens(path, [[np.arange(9, dtype=np.uint8)]], 9, ByteTokenizer())
    path.with_suffix(".json").write_bytes(header.encode("latin-1"))
    with pytest.raises(MemspanError, match="prepare the corpus again") as refusal:
        read_tokens(path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("field", ["n_tokens", "n_bytes"])
def test_an_infinite_count_is_refused(tmp_path: Path, field: str) -> None:
    path = tmp_path / "t.bin"
    write_tokens(path, [[np.arange(9, dtype=np.uint8)]], 9, ByteTokenizer())
    header = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps(header | {field: float("inf")}))
    with pytest.raises(MemspanError, match="damaged"):
        read_tokens(path)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_streamed_bytes_never_show_half_a_character(text: str) -> None:
    tokenizer = ByteTokenizer()
    decoder = tokenizer.stream_decoder()
    pieces = [decoder.push(int(i)) for i in tokenizer.encode(text.encode())]
    # A character comes with its last byte, and nothing comes before.
    assert pieces == [part for c in text for part in [""] * (len(c.encode()) - 1) + [c]]


def test_streamed_bytes_that_are_no_text_are_replaced() -> None:
    decoder = ByteTokenizer().stream_decoder()
    assert "".join(decoder.push(b) for b in b"a\xff\xe4b") == "a\ufffd\ufffdb"


def test_streamed_words_are_spaced_as_decoded() -> None:
    tokenizer = train_tokenizer("words", [b"the cat sat\n\non the mat\n"])
    ids = tokenizer.encode(b"the cat sat\n\non the mat\n")
    decoder = tokenizer.stream_decoder()
    assert "".join(decoder.push(int(i)) for i in ids) == tokenizer.decode(ids).decode()


@pytest.mark.parametrize("kind", ["characters", "words", "subwords"])
def test_text_that_is_not_utf8_says_what_to_do(kind: str) -> None:
    with pytest.raises(MemspanError, match=r"--data\.tokenizer bytes"):
        train_tokenizer(kind, [b"good", b"\xe9t\xe9"])
    tokenizer = train_tokenizer(kind, [b"good"])
    with pytest.raises(MemspanError, match=r"--data\.tokenizer bytes"):
        tokenizer.encode(b"\xe9t\xe9")


def test_subwords_need_room_for_every_byte() -> None:
    with pytest.raises(MemspanError, match="at least 256"):
        train_tokenizer("subwords", [b"abc"], 255)
    assert train_tokenizer("subwords", [b"abc " * 9], 256).vocab_size == 256


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MemspanError, match=r"pip install 'memspan\[subwords\]'"):
        train_tokenizer("subwords", [b"abc"])


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


@pytest.mark.parametrize("kind", ["bytes", "characters", "words", "subwords"])
@given(st.text("ab'\t \n\u00a0\u2028é世1.", max_size=300), st.integers(1, 40))
def test_pieces_change_neither_vocabulary_nor_tokens(kind: str, text: str, size: int) -> None:
    content = text.encode()
    chunks = [content[i : i + size] for i in range(0, len(content), size)]
    limit = 258 if kind == "subwords" else None
    tokenizer = train_tokenizer(kind, [content], limit)
    pieces = tokenizer_class(kind).pieces(chunks)
    assert train_tokenizer(kind, pieces, limit).vocabulary_hash == tokenizer.vocabulary_hash
    ids = np.concatenate([np.empty(0, int), *tokenizer.encode_stream(chunks)])
    assert ids.tolist() == tokenizer.encode(content).tolist()


def test_a_text_that_changes_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.txt"
    path.write_text("abc " * 1000)
    monkeypatch.setattr(
        "memspan.data.prepared.train_tokenizer",
        lambda *_: [path.write_text("abd " * 1000), ByteTokenizer()][1],
    )
    with pytest.raises(MemspanError, match="changed while it was read"):
        prepare(str(path), "bytes")
    assert not list(tmp_path.rglob("tokenizer.json"))
