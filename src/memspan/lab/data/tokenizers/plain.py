"""Bytes, characters and words as ids."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from memspan.errors import MemspanError
from memspan.lab.data.options import refuse_oversized_vocabulary
from memspan.lab.data.tokenizers.base import Tokenizer, decoded, utf8

UNKNOWN = "<unk>"
END_OF_LINE = "<eos>"


class ByteTokenizer(Tokenizer):
    """Ids are the bytes.

    Args:
        values: the bytes with an id, in the order of their ids, for others' vocabularies (None: all, by
            value). Without the line break among them, lines have no end; a text with any other byte is
            refused.
    """

    kind = "bytes"

    def __init__(self, values: list[int] | None = None) -> None:
        self.values = values
        self._values = np.array(range(256) if values is None else values, dtype=np.uint8)
        self._ids = np.full(256, -1, dtype=np.int16)
        self._ids[self._values] = np.arange(len(self._values))

    @property
    def vocab_size(self) -> int:
        return len(self._values)

    def encode(self, text: bytes) -> np.ndarray:
        codes = np.frombuffer(text, dtype=np.uint8)
        if self.values is None:
            return codes
        if self._ids[ord("\n")] < 0:
            codes = codes[codes != ord("\n")]
        ids = self._ids[codes]
        if (ids < 0).any():
            raise self._lacks(f"the byte {codes[ids.argmin()]}")
        return ids.astype(self.dtype)

    @staticmethod
    def pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
        return iter(chunks)

    def decode(self, ids: Iterable[int] | np.ndarray) -> bytes:
        # An array may be a whole split: not byte by byte.
        codes = ids.astype(np.uint8) if isinstance(ids, np.ndarray) else np.fromiter(ids, np.uint8)
        return (codes if self.values is None else self._values[codes]).tobytes()

    def tokens(self) -> Sequence[str | int]:
        return list(map(int, self._values))

    def content(self) -> dict[str, object]:
        return {} if self.values is None else {"values": self.values}


class CharacterTokenizer(Tokenizer):
    """The characters of the training text, sorted; id 0 is every other character.

    Args:
        characters: in the order of their ids.
        others: False, for others' vocabularies: ids begin with the first character's, and a text with
            any other is refused.
    """

    kind = "characters"

    def __init__(self, characters: str, others: bool = True) -> None:
        others = bool(others)
        # Refuses half of a surrogate pair.
        characters.encode()
        self.characters = characters
        codes = np.array([ord(c) for c in characters], dtype=np.int64)
        self.unknown = 0 if others else None
        self._ids = np.full(0x110000, 0 if others else -1, dtype=np.int32)
        self._ids[codes] = np.arange(others, len(codes) + others)

    @property
    def vocab_size(self) -> int:
        return len(self.characters) + (self.unknown is not None)

    def encode(self, text: bytes) -> np.ndarray:
        codes = np.frombuffer(utf8(text).encode("utf-32-le"), dtype=np.uint32)
        ids = self._ids[codes]
        if self.unknown is None and (ids < 0).any():
            raise self._lacks(repr(chr(codes[ids.argmin()])))
        return ids.astype(self.dtype)

    def unknown_parts(self, text: str) -> Iterator[str]:
        return (character for character in text if character not in self.characters)

    @staticmethod
    def pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
        return (text.encode() for text in decoded(chunks))

    def decode(self, ids: Iterable[int] | np.ndarray) -> bytes:
        table = "\N{REPLACEMENT CHARACTER}" * (self.unknown is not None) + self.characters
        return "".join(table[i] for i in ids).encode()

    def tokens(self) -> Sequence[str | int]:
        return ["others"] * (self.unknown is not None) + list(self.characters)

    def content(self) -> dict[str, object]:
        return {"characters": self.characters} | ({"others": False} if self.unknown is None else {})


class WordTokenizer(Tokenizer):
    """Words between white space, most frequent first; the end of a line is a word, as in WikiText.

    Others' vocabularies may lack ``<eos>``, so that lines have no end, or ``<unk>`` (or ``<UNK>``), so
    that unknown words are refused.

    Args:
        words: in the order of their ids.
        lower_case: read the text in lower case.
    """

    kind = "words"
    spaced = True

    def __init__(self, words: list[str], lower_case: bool = False) -> None:
        # Refuses half of a surrogate pair, and what is not text.
        "".join(words).encode()
        self.words = words
        self.lower_case = bool(lower_case)
        self._ids = {word: i for i, word in enumerate(words)}
        self.unknown = self._ids.get(UNKNOWN, self._ids.get(UNKNOWN.upper()))

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    def encode(self, text: bytes) -> np.ndarray:
        read = utf8(text)
        words = split_words(read.lower() if self.lower_case else read)
        if END_OF_LINE not in self._ids:
            words = (word for word in words if word != END_OF_LINE)
        get = self._ids.get
        unknown = self.unknown
        if unknown is not None:
            return np.fromiter((get(word, unknown) for word in words), dtype=self.dtype)
        try:
            return np.fromiter(map(self._ids.__getitem__, words), dtype=self.dtype)
        except KeyError as error:
            raise self._lacks(repr(error.args[0][:60])) from None

    def unknown_parts(self, text: str) -> Iterator[str]:
        words = split_words(text.lower() if self.lower_case else text)
        return (word for word in words if word not in self._ids and word != END_OF_LINE)

    def decode(self, ids: Iterable[int] | np.ndarray) -> bytes:
        words = (self.words[i] for i in ids)
        lines = " ".join("\n" if w == END_OF_LINE else w for w in words)
        return lines.replace(" \n ", "\n").replace(" \n", "\n").replace("\n ", "\n").encode()

    def respaces(self, text: bytes) -> bool:
        return re.search(rb"[\t\f\v]|  ", text) is not None

    def tokens(self) -> Sequence[str | int]:
        return list(self.words)

    def content(self) -> dict[str, object]:
        return {"words": self.words} | ({"lower_case": True} if self.lower_case else {})


class IdTokenizer(Tokenizer):
    """Ids as decimal numbers between white space, for corpora of ids from elsewhere.

    Decoding writes a space between them, and no line breaks.

    Args:
        vocab_size: ids are below it.
    """

    kind = "ids"
    spaced = True

    def __init__(self, vocab_size: int) -> None:
        refuse_oversized_vocabulary(vocab_size)
        if vocab_size < 2:
            raise ValueError("it has fewer than two ids")
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def encode(self, text: bytes) -> np.ndarray:
        ids = ids_of(text)
        if len(ids) and ids.max() >= self.vocab_size:
            raise MemspanError(
                f"{ids.max():,} is not an id below {self.vocab_size:,}: give ids of this vocabulary, "
                "or train with a larger --data.vocab-size"
            )
        return ids.astype(self.dtype)

    def decode(self, ids: Iterable[int] | np.ndarray) -> bytes:
        return " ".join(map(str, ids)).encode()

    @property
    def opening(self) -> bytes:
        return b"0"

    def alters(self, text: bytes, ids: np.ndarray) -> bool:
        # Nobody compares bits per byte of digits.
        return True

    def content(self) -> dict[str, object]:
        return {"vocab_size": self.vocab_size}


def ids_of(text: bytes) -> np.ndarray:
    """The numbers in a text, int64, 1-D."""
    words = np.array(text.split(), dtype=bytes)
    wrong = ~np.char.isdigit(words) | (np.char.str_len(words) > 8)
    if wrong.any():
        word = words[wrong.argmax()][:60].decode(errors="replace")
        raise MemspanError(f"{word!r} is not an id: give decimal numbers with spaces between them")
    return words.astype(np.int64)


def split_words(text: str) -> Iterable[str]:
    """The words of each line, followed by the end of the line; the last line may have no end."""
    lines = text.split("\n")
    for n, line in enumerate(lines):
        yield from line.split()
        if n + 1 < len(lines):
            yield END_OF_LINE
