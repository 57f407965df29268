"""Documents: parts of files, or bytes, read in chunks so that they need not fit into memory; and
their division into training, validation and test."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memspan.errors import MemspanError

CHUNK = 1 << 16
"""Bytes read at once. The sub-word library collects 256 chunks while it trains."""


@dataclass(frozen=True)
class Text:
    """Bytes ``start`` to ``stop`` of a file, or of bytes in memory."""

    source: Path | bytes
    start: int
    stop: int

    @classmethod
    def of(cls, source: Path | bytes) -> Text:
        """A whole text."""
        return cls(source, 0, len(source) if isinstance(source, bytes) else source.stat().st_size)

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> Text:
        """Its bytes ``start`` to ``stop``, as in a slice."""
        low, high, _ = slice(start, stop).indices(len(self))
        return Text(self.source, self.start + low, self.start + max(low, high))

    def read(self) -> bytes:
        """All of it."""
        return b"".join(self.chunks())

    def chunks(self) -> Iterator[bytes]:
        """All of it, in order."""
        if isinstance(self.source, bytes):
            for at in range(self.start, self.stop, CHUNK):
                yield self.source[at : min(at + CHUNK, self.stop)]
            return
        left = len(self)
        try:
            with open(self.source, "rb") as file:
                file.seek(self.start)
                while left:
                    chunk = file.read(min(CHUNK, left))
                    if not chunk:
                        raise OSError(0, "it became shorter")
                    left -= len(chunk)
                    yield chunk
        except OSError as error:
            raise MemspanError(
                f"cannot read {self.source!s} ({error.strerror}): check its permissions"
            ) from None


Splits = dict[str, list[Text]]
"""Split name -> documents."""


def by_file(files: list[tuple[str, list[Text]]]) -> Splits:
    """About 90/5/5 of the files, by a hash of their names."""
    splits: Splits = {"train": [], "validation": [], "test": []}
    for name, documents in files:
        bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 20
        splits[{0: "validation", 1: "test"}.get(bucket, "train")] += filter(len, documents)
    if all(splits.values()):
        return splits
    return by_position([text for _, documents in files for text in documents])


def by_document(documents: list[Text]) -> Splits:
    """About 90/5/5 of the bytes in order, whole documents; cut where a split would have none."""
    total = sum(map(len, documents))
    splits: Splits = {"train": [], "validation": [], "test": []}
    start = 0
    for document in filter(len, documents):
        share = 100 * start // total
        splits["train" if share < 90 else "validation" if share < 95 else "test"].append(document)
        start += len(document)
    return splits if all(splits.values()) else by_position(documents)


def by_position(documents: list[Text]) -> Splits:
    """90/5/5 of the concatenated bytes; a document may be cut between two splits."""
    total = sum(map(len, documents))
    edges = (0, total * 90 // 100, total * 95 // 100, total)
    splits: Splits = {"train": [], "validation": [], "test": []}
    start = 0
    for document in documents:
        for split, low, high in zip(splits, edges, edges[1:], strict=False):
            # No split starts inside a UTF-8 character.
            piece = document.part(
                _character_start(document, low - start), _character_start(document, high - start)
            )
            if len(piece):
                splits[split].append(piece)
        start += len(document)
    return splits


def _character_start(document: Text, position: int) -> int:
    """``position``, or up to three bytes later where a UTF-8 character begins."""
    if position <= 0:
        # The document begins here, whatever its first byte is.
        return 0
    if position >= len(document):
        return len(document)
    following = document.part(position, position + 4).read()
    for n, byte in enumerate(following):
        if byte & 0xC0 != 0x80:
            return position + n
    # No character is longer, so this is not UTF-8, unless the text ends before.
    return position if len(following) == 4 else len(document)


def encoding_of(start: bytes) -> str | None:
    """Guess the encoding of a text that is not UTF-8 from its first bytes; None: UTF-8, or no text.

    Good enough for a hint: UTF-16 by its byte order mark or by the zeros beside Latin letters, an
    encoding of one byte per character by bytes that UTF-8 cannot have.
    """
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16"
    if b"\0" in start:
        zeros = sorted(start[half::2].count(0) / max(len(start[half::2]), 1) for half in (0, 1))
        return "UTF-16" if zeros[0] < 0.1 and zeros[1] > 0.4 else None
    try:
        # The first bytes may end inside a character.
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        # No text has other control characters, whatever its encoding.
        controls = set(range(32)) - set(b"\t\n\r\f")
        return None if controls & set(start) else "Latin-1 or alike"
    return None
