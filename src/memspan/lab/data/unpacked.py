"""Compressed texts, tables of texts and arrays of ids, unpacked once into the cache as plain text.

Whatever follows reads parts of a plain file, so that a corpus need not fit into memory.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from memspan.errors import MemspanError
from memspan.files.disk import cache_folder, write_atomically
from memspan.lab.data.compressed import is_archive, is_compressed, is_damage, open_text
from memspan.lab.data.encodings import foreign_format
from memspan.lab.data.id_arrays import WIDTH, read_ids
from memspan.lab.data.records import RECORDS, damaged, suffix_of
from memspan.lab.data.tables import TABLES, read_table
from memspan.lab.data.texts import CHUNK, Text

FORMAT = "4"
"""Version of the cached files; a part of their names."""
READERS = RECORDS | dict.fromkeys(TABLES, read_table)
"""Readers of files with one document per record, by suffix."""
LEAST_LIMIT = 1 << 28
"""Bytes of text that any file may hold."""
MOST_TIMES = 200
"""A larger file may hold this many times its own size."""


class NotTextError(MemspanError):
    """A file is of a format that is not read.

    Args:
        path: the file.
        what: its format.
        remedy: how to get its text.
    """

    def __init__(self, path: Path, what: str, remedy: str) -> None:
        super().__init__(f"{path} is {what}, not text: {remedy}")
        self.reason = f"{what}, not text"


def holds_records(path: Path) -> bool:
    """True if a file has one document per record, by its name."""
    return suffix_of(path) in READERS


def documents_in(path: Path, field: str) -> list[Text]:
    """The documents of a file: the file itself, or what it holds if its name says how it is packed.

    Args:
        path: the file; those of :data:`READERS`, compressed ones, and arrays of ids are unpacked.
        field: the field or column with the text, in :data:`READERS`.

    Raises:
        NotTextError: it is of a format that is not read.
        MemspanError: it is damaged or cut short, it lacks the field, a package is missing, or the
            disk is full.
        OSError: it cannot be read.
    """
    suffix = suffix_of(path)
    if is_archive(path):
        raise NotTextError(path, "an archive", "unpack it, and give the folder")
    if suffix not in (*READERS, ".npy") and not is_compressed(path):
        texts = [Text.of(path)]
    else:
        read = read_ids if suffix == ".npy" else READERS.get(suffix, _plain)
        with open(path, "rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        documents = read(path, field)
        if read is read_table and is_compressed(path):
            documents = _bounded(path, documents)
        pieces = _checked(path, documents)
        key = [read.__name__, suffix, content, field]
        whole = read in (_plain, read_ids)
        unit = WIDTH if read is read_ids else 1
        texts = unpacked(key, pieces, origin=path, one=whole, unit=unit)
    if suffix not in READERS and texts:
        found = foreign_format(texts[0].part(0, 512).read())
        if found is not None:
            raise NotTextError(path, *found)
    return texts


def _checked(path: Path, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the same pieces, up to a limit set by the file's size; errors in reading name the file."""
    left = max(LEAST_LIMIT, MOST_TIMES * path.stat().st_size)
    try:
        for piece in pieces:
            left -= len(piece)
            if left < 0:
                raise MemspanError(
                    f"{path} holds over {MOST_TIMES} times its own size in text, which would fill the "
                    "disk: if that is meant, unpack it yourself"
                )
            yield piece
    except Exception as error:
        if isinstance(error, MemspanError) or not is_damage(error):
            raise
        raise damaged(path, error) from None


def _bounded(path: Path, documents: Iterator[bytes]) -> Iterator[bytes]:
    """``documents``, after all of the file was unpacked once, piece by piece: the library that reads
    tables takes a whole value into memory before its length can be seen."""
    for _ in _checked(path, _plain(path, "")):
        pass
    yield from documents


def unpacked(
    key: list[str],
    pieces: Iterator[bytes],
    origin: Path,
    one: bool = False,
    again: bool = False,
    unit: int = 1,
) -> list[Text]:
    """Documents as parts of a plain file in the cache, made unless it is there and whole.

    Args:
        key: what decides their content.
        pieces: each a document; iterated only if the file is made.
        origin: where they come from, for messages.
        one: all pieces are one document.
        again: make the file even if it is there.
        unit: bytes that no cut may divide.
    """
    name = hashlib.sha256(json.dumps([FORMAT, *key]).encode()).hexdigest()[:24]
    text = cache_folder() / "texts" / f"{name}.txt"
    borders = text.with_suffix(".ends")
    ends = None if again else _known_ends(text, borders)
    if ends is None:
        made = array("q", [0])
        sums = hashlib.sha256()

        def content() -> Iterator[bytes]:
            for piece in pieces:
                made.append(made[-1] + len(piece))
                sums.update(piece)
                yield piece

        write_atomically(text, content())
        ends = np.asarray([0, made[-1]] if one else made, "<i8")
        write_atomically(borders, _sealed(ends, sums.digest()))
    parts = itertools.pairwise(ends.tolist())
    return [Text(text, *part, origin=origin, unit=unit) for part in parts]


def _sealed(ends: np.ndarray, text: bytes) -> bytes:
    """The file of ``ends``: its checksum, that of the text, and the ends."""
    content = text + ends.tobytes()
    return hashlib.sha256(content).digest() + content


def _known_ends(text: Path, borders: Path) -> np.ndarray | None:
    """The ends of documents in a cached file; None if it is missing or damaged."""
    try:
        content = borders.read_bytes()
        ends = np.frombuffer(content[64:], "<i8")
        with open(text, "rb") as file:
            sums = hashlib.file_digest(file, "sha256").digest()
    # The last: half a number.
    except (OSError, ValueError):
        return None
    return ends if len(ends) and content == _sealed(ends, sums) else None


def _plain(path: Path, field: str) -> Iterator[bytes]:
    with open_text(path) as file:
        yield from iter(lambda: file.read(CHUNK), b"")
