"""Base of tokenisers, which decodes text in chunks and cuts it where no token can cross."""

from __future__ import annotations

import codecs
import hashlib
import itertools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from memspan.errors import MemspanError
from memspan.files.disk import write_atomically

LIMIT = 1 << 28
"""Maximum size of a ``tokenizer.json`` in bytes."""
COUNTED = 1 << 22
"""Ids compared at once: a corpus may be larger than memory."""


class NotUtf8Error(MemspanError):
    """A text is not UTF-8.

    Args:
        position: of its first byte that is not.
        looks: the text, and what it is.
        convert: how to convert it.
    """

    def __init__(
        self, position: int, looks: str = "the text is not UTF-8", convert: str = "convert it"
    ) -> None:
        super().__init__(
            f"{looks} (byte {position:,}): {convert}, or train with --data.tokenizer bytes"
        )
        self.position = position


class Tokenizer(ABC):
    """Text as bytes to ids in ``[0, vocab_size)``, and back."""

    kind: ClassVar[str]
    """Its name in :data:`KINDS`."""

    spaced: ClassVar[bool] = False
    """True if decoding puts a space between tokens."""

    unknown: int | None = None
    """The id of everything that the vocabulary lacks; None if it covers every text."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids."""

    @abstractmethod
    def encode(self, text: bytes) -> np.ndarray:
        """Ids, 1-D, in the smallest unsigned type that holds the vocabulary."""

    def encode_stream(self, chunks: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Encode a text that comes in chunks: its ids in order, in pieces of about the chunks' size."""
        return (ids for _, ids in self.encoded(chunks))

    def encoded(self, chunks: Iterable[bytes]) -> Iterator[tuple[bytes, np.ndarray]]:
        """The same ids, each piece with its text."""
        return ((piece, self.encode(piece)) for piece in self.pieces(chunks))

    @staticmethod
    def pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Cut a text that comes in chunks so that the pieces' ids are those of the whole text."""
        return (text.encode() for text in cut_at_gaps(decoded(chunks)))

    @abstractmethod
    def decode(self, ids: Iterable[int] | np.ndarray) -> bytes:
        """The text of ``ids``."""

    @property
    def opening(self) -> bytes:
        """Read in place of an empty prompt: a line break or, if it has none, the first token."""
        try:
            return b"\n" if len(self.encode(b"\n")) else self.decode([0])
        except MemspanError:
            return self.decode([0])

    def count_unknown(self, ids: np.ndarray) -> int:
        """Count the unknown tokens in ``ids`` (1-D), which decoding cannot restore."""
        if self.unknown is None:
            return 0
        pieces = (ids[i : i + COUNTED] for i in range(0, len(ids), COUNTED))
        return sum(int(np.count_nonzero(piece == self.unknown)) for piece in pieces)

    def unknown_parts(self, text: str) -> Iterator[str]:
        """The words or characters of ``text`` that are read as the unknown token, for messages; none if
        the tokeniser cannot tell."""
        return iter(())

    def alters(self, text: bytes, ids: np.ndarray) -> bool:
        """True if decoding the text's ``ids`` does not restore it, so that bits per byte would be those
        of another text. For words, white space does not count."""
        return False

    def respaces(self, text: bytes) -> bool:
        """True if decoding restores the text's words, but not the space between them."""
        return False

    @abstractmethod
    def content(self) -> dict[str, object]:
        """The constructor's arguments in :func:`load_tokenizer`, as JSON values.

        An argument added later is left out at its default, so that checksums stay the same.
        """

    def tokens(self) -> Sequence[str | int]:
        """Meanings of all ids, in order: equal entries of two tokenisers of a kind mean the same."""
        return list(range(self.vocab_size))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of ids: the smallest of uint8, uint16 and uint32 that holds them."""
        return np.min_scalar_type(self.vocab_size - 1)

    @property
    def vocabulary_hash(self) -> str:
        """SHA-256 of the kind and the vocabulary."""
        return hashlib.sha256(self._json().encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``, with its own checksum."""
        value = {"sha256": self.vocabulary_hash, "tokenizer": json.loads(self._json())}
        text = json.dumps(value, ensure_ascii=False, indent=None)
        write_atomically(folder / "tokenizer.json", text.encode())

    def _lacks(self, what: str) -> MemspanError:
        """The error for a text with characters or words that another program's vocabulary lacks."""
        return MemspanError(
            f"{what} is not in the vocabulary, which has no token for other {self.kind}: give a text "
            f"of its {self.kind} only"
        )

    def _json(self) -> str:
        return json.dumps({"kind": self.kind, **self.content()}, ensure_ascii=False, sort_keys=True)


class StreamDecoder:
    """Decodes ids one by one to text that can be shown at once: never half a UTF-8 character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._first = True

    def push(self, token: int) -> str:
        """The text that ``token`` completes; it may be empty."""
        piece = self._tokenizer.decode([token])
        # decode() puts spaces only between the words of one call.
        if self._tokenizer.spaced and not self._first and piece != b"\n":
            piece = b" " + piece
        self._first = piece == b"\n"
        return self._utf8.decode(piece)


def utf8(text: bytes) -> str:
    """Decode a whole text."""
    return "".join(decoded([text]))


def decoded(chunks: Iterable[bytes]) -> Iterator[str]:
    """Decode UTF-8 in chunks, which may end inside a character."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    n_bytes = 0
    for chunk in itertools.chain(chunks, [b""]):
        begun = len(decoder.getstate()[0])
        try:
            yield decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise NotUtf8Error(n_bytes - begun + error.start) from None
        n_bytes += len(chunk)


def cut_at_gaps(texts: Iterable[str], gaps: str = " \t\n") -> Iterator[str]:
    """The same text in pieces that end where a gap begins; a text without gaps is one piece.

    ``gaps``: white space that makes a gap where it stands alone, between other characters. Neither a
    word nor the pattern by which byte-level BPE splits a text (Radford et al. 2019) crosses its left
    edge.
    """
    up_to_last = re.compile(rf".*\S(?=[{gaps}]\S)" if gaps else "(?!)", re.DOTALL)
    held: list[str] = []
    rest = ""
    for text in texts:
        rest += text
        if piece := up_to_last.match(rest):
            yield "".join([*held, piece[0]])
            held = []
            rest = rest[piece.end() :]
        else:
            # The next character decides if the text ends in a gap.
            held.append(rest[:-2])
            rest = rest[-2:]
    if held or rest:
        yield "".join([*held, rest])


def bytes_of(text: str) -> bytes:
    """The text in UTF-8, with the bytes of arguments that were not UTF-8 as they were."""
    try:
        return text.encode("utf-8", errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise MemspanError(
            f"the text has half a surrogate pair, {text[error.start]!a}, at character {error.start}: "
            "correct it"
        ) from None
