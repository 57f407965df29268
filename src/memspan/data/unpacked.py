"""Compressed texts and tables of texts, unpacked once into the cache as plain text.

Whatever follows reads parts of a plain file, so that a corpus need not fit into memory.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import itertools
import json
import zlib
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from memspan.data.texts import CHUNK, Text
from memspan.errors import MemspanError, counted
from memspan.files.disk import cache_folder, write_atomically

FORMAT = "3"
"""Version of the cached files; a part of their names."""
NAME_IT = (
    "name the field of the text with --data.field in train, with --field in data prepare, evaluate "
    "and measure"
)
"""The remedy for a wrong field, in error messages."""
LINE_LIMIT = 1 << 24
"""Maximum size of a line of JSON in bytes; as Python objects it takes thirty times as much."""
LEAST_LIMIT, MOST_TIMES = 1 << 28, 200
"""A file may hold this many bytes of text, or this many times its own size if that is more."""
ROWS = 256
"""Rows of a table in memory at a time."""


class MissingFieldError(MemspanError):
    """Records lack the field, from the first one on."""


def holds_records(path: Path) -> bool:
    """Whether a file has one document per record, by its name; see :data:`RECORDS`."""
    return _suffix(path) in RECORDS


def documents_in(path: Path, field: str) -> list[Text]:
    """The documents of a file: the file itself, or what it holds if its name says how it is packed.

    Args:
        path: the file; those of :data:`RECORDS` and ``.gz`` are unpacked.
        field: the field or column with the text, in :data:`RECORDS`.

    Raises:
        MemspanError: it is damaged or cut short, it lacks the field, a package is missing, or the
            disk is full.
        OSError: it cannot be read.
    """
    suffix = _suffix(path)
    # An archive holds files, not a text.
    if suffix not in RECORDS and (not _is_zipped(path) or suffix == ".tar"):
        return [Text.of(path)]
    read = RECORDS.get(suffix, _gzip)
    with open(path, "rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    pieces = _checked(path, read(path, field))
    return unpacked([read.__name__, content, field], pieces, one=read is _gzip)


def _checked(path: Path, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same pieces, up to what the file's size justifies; errors in reading it name it."""
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
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, error) from None


def unpacked(
    key: list[str], pieces: Iterator[bytes], one: bool = False, again: bool = False
) -> list[Text]:
    """Documents as parts of a plain file in the cache, made unless it is there.

    Args:
        key: what decides their content.
        pieces: each a document; iterated only if the file is made.
        one: all pieces are one document.
        again: make the file even if it is there.
    """
    name = hashlib.sha256(json.dumps([FORMAT, *key]).encode()).hexdigest()[:24]
    text = cache_folder() / "texts" / f"{name}.txt"
    borders = text.with_suffix(".ends")
    if again or not (text.exists() and borders.exists()):
        ends = array("q", [0])

        def content() -> Iterator[bytes]:
            for piece in pieces:
                ends.append(ends[-1] + len(piece))
                yield piece

        write_atomically(text, content())
        found = [0, ends[-1]] if one else ends
        write_atomically(borders, np.asarray(found, "<i8").tobytes())
    return [Text(text, *ends) for ends in itertools.pairwise(np.fromfile(borders, "<i8").tolist())]


def record_bytes(value: object, field: str, where: str) -> bytes:
    """The text of a record as a document, which ends with a line break."""
    if not isinstance(value, str):
        kind = "missing" if value is None else f"of type {type(value).__name__}"
        raise MemspanError(f"{where}: {field} is {kind}, not text: {NAME_IT}")
    try:
        text = value.encode()
    except UnicodeEncodeError:
        raise MemspanError(f"{where}: {field} has half a surrogate pair: correct it") from None
    # Without it, memory that is carried on would meet two documents as one line.
    return text if text.endswith(b"\n") or not text else text + b"\n"


def missing_field(
    where: str, field: str, known: Iterable[object], instead: str = "", first: bool = True
) -> MemspanError:
    """The error for a record without the field. ``first``: it is the file's first record."""
    names = ", ".join(repr(name)[:60] for name in list(known)[:20]) or "none"
    kind = MissingFieldError if first else MemspanError
    return kind(f"{where} has no {field!r}; it has {names}: {NAME_IT}{instead}")


def _is_zipped(path: Path) -> bool:
    return path.name.lower().endswith(".gz")


def _suffix(path: Path) -> str:
    """The suffix that says what a file holds, such as ``.csv``, compressed or not."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _gzip(path: Path, field: str) -> Iterator[bytes]:
    with gzip.open(path, "rb") as file:
        yield from iter(lambda: file.read(CHUNK), b"")


def _unzipped(path: Path) -> Any:
    return (gzip.open if _is_zipped(path) else open)(path, "rb")


def _json_lines(path: Path, field: str) -> Iterator[bytes]:
    with _unzipped(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(LINE_LIMIT + 1), b""), 1):
            if line.strip():
                yield _json_text(line, field, path, number)


def _json_text(line: bytes, field: str, path: Path, number: int) -> bytes:
    where = f"{path}, line {number:,}"
    if len(line) > LINE_LIMIT:
        raise MemspanError(f"{where} has over {LINE_LIMIT:,} bytes: JSON Lines are one record each")
    try:
        record: Any = json.loads(line.decode("utf-8-sig"))
    # Not UTF-8, not JSON, or nested too deep.
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", error)
        raise MemspanError(f"{where} is not JSON ({reason}): correct the line") from None
    if not isinstance(record, dict):
        raise MemspanError(
            f"{where} is not a JSON object: give lines such as {{{json.dumps(field)}: ...}}"
        )
    if field not in record:
        raise missing_field(where, field, record, first=number == 1)
    return record_bytes(record[field], field, where)


def _csv(path: Path, field: str) -> Iterator[bytes]:
    """RFC 4180; the first line names the columns. The separator is a tab or, in a ``.csv``, the most
    frequent of comma, semicolon and tab there."""
    # The default is 131,072 characters; the limit is global to the csv module.
    csv.field_size_limit(LINE_LIMIT)
    try:
        with _unzipped(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as lines:
            first = lines.readline(LINE_LIMIT)
            separator = "\t" if _suffix(path) == ".tsv" else max(",;\t", key=first.count)
            rows = csv.reader(itertools.chain([first], lines), delimiter=separator, strict=True)
            columns = next(rows, [])
            if not first:
                return
            if columns.count(field) > 1:
                raise MemspanError(f"{path} has several columns {field!r}: rename all but one")
            if field not in columns:
                instead = ", or call it .txt to read it as it is"
                raise missing_field(str(path), field, columns, instead)
            for row in filter(None, rows):
                where = f"{path}, line {rows.line_num:,}"
                if len(row) != len(columns):
                    raise MemspanError(
                        f"{where} has {counted(len(row), 'column')}, the first line "
                        f"{len(columns):,}: quote texts with {separator!r}, quotes or line breaks"
                    )
                yield record_bytes(row[columns.index(field)], field, where)
    except csv.Error as error:
        raise MemspanError(
            f"{path}, line {rows.line_num:,} is not valid ({str(error)!a}): double the quotes inside "
            'quotes, and quote texts that begin with "'
        ) from None
    except UnicodeDecodeError as error:
        raise MemspanError(f"{path} is not UTF-8 ({error.reason}): convert it") from None


def _parquet(path: Path, field: str) -> Iterator[bytes]:
    try:
        import pyarrow.lib
        import pyarrow.parquet
    except ImportError:
        raise MemspanError(f"{path} is Parquet, which needs pyarrow: pip install pyarrow") from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field not in names:
                raise missing_field(str(path), field, names)
            for batch in file.iter_batches(ROWS, columns=[field]):
                for value in batch.column(0):
                    number += 1
                    yield record_bytes(value.as_py(), field, f"{path}, row {number:,}")
    # The last: text that is not UTF-8.
    except (pyarrow.lib.ArrowException, UnicodeDecodeError) as error:
        raise _damaged(path, error) from None


RECORDS = {".jsonl": _json_lines, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet}
"""Readers of files of records, one document each, by suffix."""


def _damaged(path: Path, error: Exception) -> MemspanError:
    reason = next(iter(str(error).splitlines()), "no reason given")[:200].rstrip(". ")
    return MemspanError(f"{path} is cut short or damaged ({reason}): get the file again")
