"""Tokenisers: what they keep, how they stream, and what they refuse."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memspan.data.options import TOKENIZERS
from memspan.data.tokenizers.base import StreamDecoder
from memspan.data.tokenizers.plain import ByteTokenizer, WordTokenizer
from memspan.data.tokenizers.registry import KINDS, load_tokenizer, train_tokenizer
from memspan.errors import MemspanError

TEXT = "Grüße, the cat sat on the mat.\n\nThe cat, it sat!\n" * 20


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_what_is_encoded_is_decoded(kind: str, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(kind, [TEXT.encode()], 300)
    ids = tokenizer.encode(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT.encode()
    assert ids.dtype == (np.uint8 if tokenizer.vocab_size <= 256 else np.uint16)
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.vocabulary_hash == tokenizer.vocabulary_hash
    assert np.array_equal(again.encode(TEXT.encode()), ids)
    decoder = StreamDecoder(tokenizer)
    assert "".join(decoder.push(int(i)) for i in ids) == TEXT


def test_unseen_characters_are_unknown_and_other_bytes_refused_with_their_place() -> None:
    tokenizer = train_tokenizer("characters", [b"abc"])
    assert tokenizer.encode("abz€".encode()).tolist() == [1, 2, 0, 0]
    with pytest.raises(MemspanError, match=r"not UTF-8 \(byte 6\)"):
        list(tokenizer.encode_stream([b"abc\xc3", b"\xa9c\xff", b"abc"]))


def test_words_are_ranked_and_limited() -> None:
    tokenizer = train_tokenizer("words", [b"a b a c a b <unk>\nd"], 5)
    assert isinstance(tokenizer, WordTokenizer)
    assert tokenizer.words[:2] == ["a", "b"]
    assert {"<eos>", "<unk>"} <= set(tokenizer.words)
    assert len(tokenizer.words) == 5
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


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), st.binary())
def test_streamed_bytes_never_show_half_a_character(text: str, any_bytes: bytes) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(any_bytes)) == any_bytes
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push(int(i)) for i in tokenizer.encode(text.encode())]
    # A character comes with its last byte, and nothing comes before.
    assert pieces == [part for c in text for part in [""] * (len(c.encode()) - 1) + [c]]


@pytest.mark.parametrize("kind", TOKENIZERS[1:])
def test_text_that_is_not_utf8_says_what_to_do(kind: str) -> None:
    with pytest.raises(MemspanError, match=r"--data\.tokenizer bytes"):
        train_tokenizer(kind, [b"good", b"\xe9t\xe9"])
    tokenizer = train_tokenizer(kind, [b"good"])
    with pytest.raises(MemspanError, match=r"--data\.tokenizer bytes"):
        tokenizer.encode(b"\xe9t\xe9")


def test_what_subwords_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for every byte, and an extra."""
    with pytest.raises(MemspanError, match="at least 256"):
        train_tokenizer("subwords", [b"abc"], 255)
    assert train_tokenizer("subwords", [b"abc " * 9], 256).vocab_size == 256
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MemspanError, match="pip install tokenizers"):
        train_tokenizer("subwords", [b"abc"])


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(st.text("ab'\t \r\n\u00a0\u2028\u3000é世1!.", max_size=300), st.integers(1, 40))
def test_pieces_change_neither_vocabulary_nor_tokens(kind: str, text: str, size: int) -> None:
    content = text.encode()
    chunks = [content[i : i + size] for i in range(0, len(content), size)]
    limit = 258 if kind == "subwords" else None
    tokenizer = train_tokenizer(kind, [content], limit)
    pieces = KINDS[kind].pieces(chunks)
    assert train_tokenizer(kind, pieces, limit).vocabulary_hash == tokenizer.vocabulary_hash
    ids = np.concatenate([np.empty(0, int), *tokenizer.encode_stream(chunks)])
    assert ids.tolist() == tokenizer.encode(content).tolist()
