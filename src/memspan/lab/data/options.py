"""Options of the corpus and its tokeniser."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Annotated

import tyro

from memspan.calls import Options
from memspan.checks import at_least, check_types
from memspan.errors import MemspanError

TOKENIZERS = ("bytes", "characters", "words", "subwords", "ids")
"""Kinds of tokenisers that are made from a text."""
TOKENIZER_HELP = (
    "Tokeniser: bytes, characters, words or subwords (which need the library tokenizers), made from "
    "the training text; ids, if the text is token ids (.npy, or decimal numbers); or the path of an "
    "existing tokenizer.json, from a run or from the library tokenizers, with any model. Words and "
    "characters outside the vocabulary become one unknown token; a text that contains it, or that the "
    "tokeniser cannot restore, is not scored in bits per byte."
)
FIELD_HELP = (
    "Field or column that holds each record's text, in JSON Lines, JSON, CSV, Parquet and data sets; "
    "a.b is field b inside a, and messages[].content is field content of each record in a list."
)
DEFAULT_CORPUS = "two-plays"
SPLITS = ("train", "validation", "test")
TEXTS = ("corpus", *SPLITS)
"""Options that name a text."""
MOST_TOKENS = 1 << 24
"""Maximum size of a vocabulary."""

Texts = str | Mapping[str, str]
"""A corpus, or a text for each split."""


def title(texts: Texts) -> str:
    """The name of texts in messages: ``book.txt``, or ``train a.txt, validation b.txt``."""
    if isinstance(texts, str):
        return texts
    return ", ".join(f"{split} {name}" for split, name in texts.items())


@dataclass(frozen=True)
class DataConfig(Options):
    """The text and its tokeniser."""

    corpus: str | None = None
    """A named corpus (see `memspan data list`); a file, a folder or a quoted glob of text, also
    compressed (.gz, .bz2, .xz, .zst, or a .zip with one file); records with one text each in JSON
    Lines (.jsonl, .ndjson) or JSON (.json), also compressed; a NumPy array of token ids (.npy);
    with the extra datasets, a table (.csv and .tsv with column names in the first line, and
    .parquet), a folder saved by Hugging Face's datasets, or hf:NAME, a data set on its hub. It is
    split for training, validation and test. -: standard input, for a new run; the text is kept in a
    file next to the run's folder. None: two-plays, or the text that train names."""
    train: str | None = dataclass_field(default=None, kw_only=True)
    """Text to train on, instead of corpus, and named like one: all of it or, for a named corpus or
    data set, its train split; NAME#SPLIT takes another."""
    validation: str | None = dataclass_field(default=None, kw_only=True)
    """Text to validate with; only with train (None: the end of train's text)."""
    test: str | None = dataclass_field(default=None, kw_only=True)
    """Text for testing, as with `memspan evaluate --split test`; only with train."""
    tokenizer: Annotated[str, tyro.conf.arg(help=TOKENIZER_HELP)] = "bytes"
    vocab_size: int | None = None
    """For words and subwords, the largest vocabulary (None: 300,000 words, 8,192 subwords); for
    ids, the size of the vocabulary (None: the largest id of the training split plus 1)."""
    document_reset: bool = False
    """Read every document separately, in training and evaluation: nothing before its first token is
    visible, in the segment or in memory (off: memory is carried from document to document)."""
    field: Annotated[str, tyro.conf.arg(help=FIELD_HELP)] = "text"

    def __post_init__(self) -> None:
        check_types(self)
        own = {split: getattr(self, split) for split in SPLITS}
        if self.train is None and (extra := [split for split in own if own[split] is not None]):
            raise MemspanError(
                f"{' and '.join(extra)} go{'es' * (len(extra) == 1)} with train, in place of a corpus: "
                "name the text to train on, with --data.train"
            )
        if self.train is not None and self.corpus is not None:
            raise MemspanError(
                f"corpus {self.corpus} would be split, and train {self.train} is a split: drop one of "
                "them"
            )
        if "-" in own.values():
            raise MemspanError("standard input can be the corpus, not a split: give a file")
        if self.train is self.corpus is None:
            object.__setattr__(self, "corpus", DEFAULT_CORPUS)
        refuse_sentence_piece(self.tokenizer)
        if self.tokenizer not in TOKENIZERS and not self.tokenizer.endswith(".json"):
            raise MemspanError(
                f"there is no tokenizer {self.tokenizer!r}: use {', '.join(TOKENIZERS)}, or the path "
                "of a tokenizer.json"
            )
        if self.vocab_size is not None:
            at_least(2, self, "vocab_size")
            refuse_oversized_vocabulary(self.vocab_size)
            if self.tokenizer not in ("words", "subwords", "ids"):
                raise MemspanError(
                    f"vocab_size belongs to the tokenizers words, subwords and ids, not "
                    f"{self.tokenizer}: drop one of them"
                )
        # Control characters would reach the terminal; TOML cannot hold half a surrogate pair.
        names = {"corpus": self.corpus, **own, "field": self.field, "tokenizer": self.tokenizer}
        for what, name in names.items():
            if re.search(r"[\0-\x1f\x7f-\x9f\ud800-\udfff]", name or ""):
                raise MemspanError(
                    f"the {what}'s name {name!r} has control characters or is not Unicode: rename it"
                )

    @property
    def texts(self) -> Texts:
        """The corpus, or the text of each split that has one."""
        if self.corpus is not None:
            return self.corpus
        return {name: text for name in SPLITS if (text := getattr(self, name)) is not None}


def refuse_sentence_piece(path: str) -> None:
    """Refuse SentencePiece's own file, which the library ``tokenizers`` does not read.

    Raises:
        MemspanError: it is one, by its name.
    """
    if path.endswith(".model"):
        raise MemspanError(
            f"{path} is a SentencePiece model: with transformers and sentencepiece installed, "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), in Python, writes a "
            "tokenizer.json into its folder; give that"
        )


def refuse_oversized_vocabulary(vocab_size: int) -> None:
    """Refuse a vocabulary whose embedding no machine could train."""
    if vocab_size > MOST_TOKENS:
        raise MemspanError(f"vocab_size must be at most {MOST_TOKENS:,}, not {vocab_size}")
