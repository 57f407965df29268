"""Options of the corpus and its tokeniser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memspan.checks import at_least, check_types
from memspan.errors import MemspanError

MOST_TOKENS = 1 << 24
"""Maximum size of a vocabulary."""


@dataclass(frozen=True)
class DataConfig:
    """The text, and what its tokens are."""

    corpus: str = "python-stdlib"
    """A named corpus (see `memspan data list`); a file, a folder or a quoted glob of text, also
    compressed (.gz); records with a text each in JSON Lines (.jsonl, .jsonl.gz) or Parquet (extra
    `memspan[parquet]`); a folder that Hugging Face's datasets saved, or hf:NAME, a data set on its hub
    (extra `memspan[datasets]`)."""
    tokenizer: Literal["bytes", "characters", "words", "subwords"] = "bytes"
    """What a token is. subwords needs the extra `memspan[subwords]`. Words and characters outside the
    vocabulary become one unknown token; a text that contains it is not scored in bits per byte."""
    vocab_size: int | None = None
    """Largest vocabulary, for words and subwords (None: words 300,000, subwords 8,192)."""
    document_reset: bool = False
    """Read every document by itself, in training and evaluation: nothing before its first token is
    visible, in the segment or in memory (off: memory is carried from document to document)."""
    field: str = "text"
    """Field or column that holds each record's text, in JSON Lines, Parquet and data sets."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.vocab_size is not None:
            at_least(2, self, "vocab_size")
            refuse_oversized_vocabulary(self.vocab_size)
            if self.tokenizer in ("bytes", "characters"):
                raise MemspanError(
                    f"vocab_size belongs to the tokenizers words and subwords, not {self.tokenizer}: "
                    "drop one of them"
                )
        # Control characters would reach the terminal; TOML cannot hold half a surrogate pair.
        for what, name in (("corpus", self.corpus), ("field", self.field)):
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
