"""Our tokenisers in transformers: the same ids for every text, and the same text back."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from memspan.errors import MemspanError
from memspan.lab.data.tokenizers.base import Tokenizer
from memspan.lab.data.tokenizers.plain import ByteTokenizer, CharacterTokenizer, WordTokenizer
from memspan.lab.data.tokenizers.registry import KINDS, train_tokenizer
from memspan.lab.integrations.transformers import MemspanConfig, fast_tokenizer

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


def assert_same(own: Tokenizer, theirs: Any, text: str) -> None:
    ids = own.encode(text.encode()).tolist()
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids).encode() == own.decode(ids)


@pytest.mark.smoke
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ids"])
@given(parts=st.lists(pieces))
@example(parts=[TEXT])
@settings(max_examples=40)
def test_ids_and_texts_match_the_original_tokeniser(kind: str, parts: list[str]) -> None:
    assert_same(*both(kind), "".join(parts))


OTHERS: dict[str, tuple[Tokenizer, str]] = {
    "words in lower case": (WordTokenizer(["a", "bb", "<UNK>"], lower_case=True), "A bb"),
    "words and lines": (
        WordTokenizer(["a", "bb", "é", "aa", "<eos>", "δς'", "δσ'δ"], lower_case=True),
        "A  bB\nÉ <eos> aa ΔΣ' ΔΣ'Δ\n",
    ),
    "characters without others": (CharacterTokenizer("ab\n ", others=False), "b a\n"),
    "bytes without a line break": (ByteTokenizer([200, 32, 97, 195, 169]), "a é\na"),
}


@pytest.mark.parametrize(("own", "text"), OTHERS.values(), ids=OTHERS)
def test_foreign_tokenisers(own: Tokenizer, text: str) -> None:
    assert_same(own, fast_tokenizer(own), text)


@pytest.mark.parametrize("name", ["words and lines", "characters without others"])
def test_text_without_an_id_is_refused(name: str) -> None:
    with pytest.raises(Exception, match="UNK"):
        fast_tokenizer(OTHERS[name][0])("unheard")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ids"])
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
