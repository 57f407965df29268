"""Our tokenisers in transformers: the same ids for every text, and the same text back."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from memspan.data.tokenizers.base import Tokenizer
from memspan.data.tokenizers.bytes import ByteTokenizer
from memspan.data.tokenizers.characters import CharacterTokenizer
from memspan.data.tokenizers.registry import KINDS, train_tokenizer
from memspan.data.tokenizers.words import WordTokenizer
from memspan.errors import MemspanError
from memspan.integrations.transformers import MemspanConfig, fast_tokenizer

TEXT = "a <eos> b <unk> c\n\n d\u3000e\x1cf é日本 <pad> Ā aaa aab x<eos>y # '## , .\ufffd"
pieces = st.one_of(
    st.text(st.one_of(st.sampled_from(TEXT + "\t\x85\u2028<>"), st.characters(codec="utf-8"))),
    st.sampled_from(["<eos>", "<unk>", "<pad>", "\n", " ", "##"]),
)


@functools.cache
def both(kind: str) -> tuple[Tokenizer, Any]:
    """Ours, and what AutoTokenizer reads of it from a folder."""
    own = train_tokenizer(kind, [TEXT.encode()], 300)
    with tempfile.TemporaryDirectory() as folder:
        fast_tokenizer(own).save_pretrained(folder)
        MemspanConfig().save_pretrained(folder)
        return own, AutoTokenizer.from_pretrained(folder)


@pytest.mark.smoke
@pytest.mark.parametrize("kind", KINDS)
@given(parts=st.lists(pieces))
@example(parts=[TEXT])
@settings(max_examples=40)
def test_the_same_ids_and_the_same_text(kind: str, parts: list[str]) -> None:
    own, theirs = both(kind)
    text = "".join(parts)
    ids = own.encode(text.encode()).tolist()
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids).encode() == own.decode(ids)


def test_words_of_others() -> None:
    """In lower case, without an end of line or a word for the unknown, or with another."""
    text = "A  bB\nÉ <eos> aa ΔΣ' ΔΣ'Δ\n"
    sigma = "ΔΣ' ΔΣ'Δ".lower().split()
    for words in (["a", "bb", "<UNK>"], ["a", "bb", "é", "aa", "<eos>", *sigma]):
        own = WordTokenizer(words, lower_case=True)
        theirs = fast_tokenizer(own)
        ids = own.encode(text.encode() if "<eos>" in words else b"A bb").tolist()
        assert theirs(text if "<eos>" in words else "A bb")["input_ids"] == ids
        assert theirs.decode(ids).encode() == own.decode(ids)
    with pytest.raises(Exception, match="UNK"):
        theirs("unheard")


def test_characters_of_others() -> None:
    """Without an id for those that are not among them."""
    own = CharacterTokenizer("ab\n ", others=False)
    theirs = fast_tokenizer(own)
    assert theirs("b a\n")["input_ids"] == own.encode(b"b a\n").tolist() == [1, 3, 0, 2]
    assert theirs.decode([1, 3, 0, 2]) == "b a\n"
    with pytest.raises(Exception, match="UNK"):
        theirs("c")


def test_bytes_of_others() -> None:
    """In another order, and without the line break, which is left out."""
    own = ByteTokenizer([200, 32, 97, 195, 169])
    theirs = fast_tokenizer(own)
    assert theirs("a é\na")["input_ids"] == own.encode("a é\na".encode()).tolist()
    assert theirs.decode([2, 1, 3, 4]) == "a é"


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_padded_outside_of_the_vocabulary(kind: str) -> None:
    own, theirs = both(kind)
    assert theirs.pad_token_id == own.vocab_size
    batch = theirs(["a", "a b c"], padding=True)
    assert batch["input_ids"][0][0] == own.vocab_size
    assert batch["attention_mask"][0][0] == 0
    assert set(batch) == {"input_ids", "attention_mask"}


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    class Morse(type(both("bytes")[0])):  # type: ignore[misc]
        kind = "morse"

    with pytest.raises(MemspanError, match="a tokenizer of kind morse cannot be exported: use one"):
        fast_tokenizer(Morse())
