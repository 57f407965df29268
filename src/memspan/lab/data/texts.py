"""Documents: parts of files, or bytes, read in chunks so that they need not fit into memory; and
their division into training, validation and test."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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
    origin: Path | None = field(default=None, compare=False)
    """The file that was unpacked into ``source``, if any."""
    unit: int = 1
    """Bytes that no cut may divide: more than one for ids, see :mod:`memspan.lab.data.id_arrays`."""

    @classmethod
    def of(cls, source: Path | bytes) -> Text:
        """A whole text."""
        return cls(source, 0, len(source) if isinstance(source, bytes) else source.stat().st_size)

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> Text:
        """Bytes ``start`` to ``stop``, as in a slice."""
        low, high, _ = slice(start, stop).indices(len(self))
        return replace(self, start=self.start + low, stop=self.start + max(low, high))

    @property
    def name(self) -> str:
        """The file's name in messages."""
        return "the text" if isinstance(self.source, bytes) else str(self.origin or self.source)

    def read(self) -> bytes:
        """The whole text."""
        return b"".join(self.chunks())

    def chunks(self) -> Iterator[bytes]:
        """The whole text in order, in chunks."""
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
                f"cannot read {self.name} ({error.strerror}): check its permissions"
            ) from None


Splits = dict[str, list[Text]]
"""Split name -> documents."""


def by_file(files: list[tuple[str, list[Text]]]) -> Splits:
    """About 90/5/5 of the files, by a hash of their names."""
    splits: Splits = {"train": [], "validation": [], "test": []}
    for name, documents in files:
        bucket = (
            int.from_bytes(
                hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:4], "big"
            )
            % 20
        )
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


def joined(documents: list[Text]) -> list[Text]:
    """Join documents that continue where the one before ends; the text is the same."""
    found: list[Text] = []
    for each in documents:
        before = found[-1] if found else None
        if before and before.source == each.source and before.stop == each.start:
            found[-1] = replace(before, stop=each.stop)
        else:
            found.append(each)
    return found


def _character_start(document: Text, position: int) -> int:
    """``position``, or up to three bytes later where a UTF-8 character begins; the start of an id."""
    if position <= 0:
        # The document begins here, whatever its first byte is.
        return 0
    if position >= len(document):
        return len(document)
    if document.unit > 1:
        return position // document.unit * document.unit
    following = document.part(position, position + 4).read()
    for n, byte in enumerate(following):
        if byte & 0xC0 != 0x80:
            return position + n
    # No character is longer, so this is not UTF-8, unless the text ends before.
    return position if len(following) == 4 else len(document)
