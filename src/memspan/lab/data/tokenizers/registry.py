"""The kinds of tokenisers: made from a text, and read from a file."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from memspan.errors import MemspanError
from memspan.files.disk import read_limited, unreadable
from memspan.lab.data.options import refuse_oversized_vocabulary
from memspan.lab.data.tokenizers import library, plain
from memspan.lab.data.tokenizers.base import LIMIT, Tokenizer, utf8

KINDS: dict[str, type[Tokenizer]] = {
    "bytes": plain.ByteTokenizer,
    "characters": plain.CharacterTokenizer,
    "words": plain.WordTokenizer,
    "ids": plain.IdTokenizer,
    "subwords": library.SubwordTokenizer,
    "library": library.LibraryTokenizer,
}
OURS = b'{"sha256": '
"""The beginning of files of :meth:`Tokenizer.save`."""


def train_tokenizer(
    kind: str, documents: Iterable[bytes], vocab_size: int | None = None
) -> Tokenizer:
    """Make a tokeniser from training text.

    Args:
        kind: see :data:`KINDS`.
        documents: the text; a long document may come in :meth:`Tokenizer.pieces`. Its distinct
            characters or words are held in memory.
        vocab_size: maximum number of ids, for words and sub-words; their number, for ids (None: the
            largest, and 1).

    Raises:
        MemspanError: text that is not UTF-8 where characters are needed; a missing extra; a
            vocabulary of sub-words that cannot hold the 256 bytes.
    """
    # The sub-word library allocates this many, and aborts the process if it cannot.
    refuse_oversized_vocabulary(vocab_size or 0)
    if kind == "bytes":
        return plain.ByteTokenizer()
    if kind == "characters":
        characters: set[str] = set()
        for document in documents:
            characters.update(utf8(document))
        return plain.CharacterTokenizer("".join(sorted(characters)))
    if kind == "words":
        counts: Counter[str] = Counter()
        for document in documents:
            counts.update(plain.split_words(utf8(document)))
        # The end of line and the unknown word always have an id.
        special = (plain.END_OF_LINE, plain.UNKNOWN)
        ranked = sorted(
            {*counts, *special}, key=lambda word: (word not in special, -counts[word], word)
        )[: max(vocab_size or 300_000, len(special))]
        return plain.WordTokenizer(sorted(ranked, key=lambda word: (-counts[word], word)))
    if kind == "ids":
        largest = (int(plain.ids_of(document).max(initial=0)) for document in documents)
        return plain.IdTokenizer(vocab_size or max(largest, default=0) + 1)
    return library.train_subwords(documents, vocab_size)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read a run's ``tokenizer.json``."""
    return _load(folder / "tokenizer.json")


def read_tokenizer(path: Path) -> Tokenizer:
    """A ``tokenizer.json``: a run's, or one of the library ``tokenizers``."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        if file.read(len(OURS)) == OURS:
            return _load(path)
    return library.read_library_tokenizer(path)


def _load(path: Path) -> Tokenizer:
    try:
        value = json.loads(read_limited(path, LIMIT))
        content = dict(value["tokenizer"])
        kind = content.pop("kind")
        tokenizer = KINDS[kind](**content)
        if tokenizer.vocabulary_hash != value["sha256"]:
            raise ValueError("its checksum is wrong")
    except FileNotFoundError:
        raise MemspanError(f"{path} is missing: restore it") from None
    except OSError as error:
        # The file may well be whole.
        raise unreadable(path, error) from None
    except BaseException as error:
        # A damaged file may hold anything.
        if isinstance(error, MemspanError) or not library.is_failure(error):
            raise
        raise MemspanError(f"{path} is damaged ({error}): restore it") from None
    return tokenizer
