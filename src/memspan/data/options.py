"""Options of the corpus and its tokeniser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from memspan.checks import at_least, check_types
from memspan.errors import MemspanError

TOKENIZERS = ("bytes", "characters", "words", "subwords")
"""Kinds of tokenisers that are made from a text."""
TOKENIZER_HELP = (
    "What a token is: bytes, characters, words or subwords (which need tokenizers), made from "
    "the training text; or an existing tokenizer.json by its path: a run's, or one of the library "
    "tokenizers that is a byte-level BPE, such as GPT-2's. Words and characters outside the "
    "vocabulary become one unknown token; a text that contains it is not scored in bits per byte."
)
FIELD_HELP = "Field or column that holds each record's text, in JSON Lines, Parquet and data sets."
MOST_TOKENS = 1 << 24
"""Maximum size of a vocabulary."""


@dataclass(frozen=True)
class DataConfig:
    """The text, and what its tokens are."""

    corpus: str = "two-plays"
    """A named corpus (see `memspan data list`); a file, a folder or a quoted glob of text, also
    compressed (.gz); records with a text each in JSON Lines (.jsonl, .jsonl.gz) or Parquet (which
    needs pyarrow); a folder that Hugging Face's datasets saved, or hf:NAME, a data set on its hub
    (both need datasets). -: standard input, for a new run, which is kept in a file beside the
    run's folder."""
    tokenizer: Annotated[str, tyro.conf.arg(help=TOKENIZER_HELP)] = "bytes"
    vocab_size: int | None = None
    """Largest vocabulary, for words and subwords (None: words 300,000, subwords 8,192)."""
    document_reset: bool = False
    """Read every document by itself, in training and evaluation: nothing before its first token is
    visible, in the segment or in memory (off: memory is carried from document to document)."""
    field: Annotated[str, tyro.conf.arg(help=FIELD_HELP)] = "text"

    def __post_init__(self) -> None:
        check_types(self)
        if self.tokenizer not in TOKENIZERS and not self.tokenizer.endswith(".json"):
            raise MemspanError(
                f"there is no tokenizer {self.tokenizer!r}: use {', '.join(TOKENIZERS)}, or the path "
                "of a tokenizer.json"
            )
        if self.vocab_size is not None:
            at_least(2, self, "vocab_size")
            refuse_oversized_vocabulary(self.vocab_size)
            if self.tokenizer not in ("words", "subwords"):
                raise MemspanError(
                    f"vocab_size belongs to the tokenizers words and subwords, not {self.tokenizer}: "
                    "drop one of them"
                )
        # Control characters would reach the terminal; TOML cannot hold half a surrogate pair.
        for what, name in (
            ("corpus", self.corpus),
            ("field", self.field),
            ("tokenizer", self.tokenizer),
        ):
            if any(ord(c) < 32 or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000 for c in name):
                raise MemspanError(
                    f"the {what}'s name {name!r} has control characters or is no Unicode: rename it"
                )


def refuse_oversized_vocabulary(vocab_size: int) -> None:
    """Refuse a vocabulary whose embedding no machine could train.

    Raises:
        MemspanError: it has over :data:`MOST_TOKENS` ids.
    """
    if vocab_size > MOST_TOKENS:
        raise MemspanError(f"vocab_size must be at most {MOST_TOKENS:,}, not {vocab_size}")
