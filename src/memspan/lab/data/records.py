"""Files of records, one document each: JSON Lines and JSON."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from memspan.errors import MemspanError
from memspan.lab.data.compressed import name_inside, open_text

NAME_IT = (
    "name the field of the text with --data.field in train, with --field in data prepare, evaluate "
    "and measure"
)
"""The remedy for a wrong field, in error messages."""
LINE_LIMIT = 1 << 24
"""Maximum size of a record in bytes; as Python objects it takes thirty times as much."""
CHUNK = 1 << 16
"""Bytes of JSON read at once."""
AS_IT_IS = ", or call it .txt to read it as it is"


class MissingFieldError(MemspanError):
    """Records lack the field, from the first one on."""


def column_of(field: str, columns: Iterable[str]) -> str:
    """The column that holds ``field``: itself or, of a path such as ``messages[].content``, its first
    part."""
    return field if field in columns else _steps(field)[0][0]


def _steps(field: str) -> list[tuple[str, bool]]:
    """A path's parts, each a name and whether it goes on in every element of a list."""
    parts = (re.fullmatch(r"(.*?)((?:\[\])?)", part, re.DOTALL) for part in field.split("."))
    return [(part[1], bool(part[2])) for part in parts if part]


def record_text(record: dict[str, Any], field: str, where: str, first: bool = False) -> bytes:
    """The text of a record as a document, which ends with a line break; nothing if it is null.

    Args:
        record: its values by name.
        field: the name of the text's, or the path to texts inside it: ``a.b`` is field ``b`` of the
            record ``a``, and ``messages[].content`` that of every record in a list, each with a line
            break at its end.
        where: the record's place, for messages.
        first: it is the file's first record.

    Raises:
        MissingFieldError: the first record has no such field.
        MemspanError: a later one has not, or it holds something else than text.
    """
    if field in record:
        return _bytes_of(record[field], field, where)
    found: list[Any] = [record]
    at = ""
    for name, each in _steps(field):
        values = []
        for value in found:
            if isinstance(value, dict) and name not in value:
                nested = (
                    _path_to_text(v, at + k) for k, v in value.items() if not isinstance(v, str)
                )
                path = next(filter(None, nested), None)
                inside = f", such as {path}" if path else ""
                raise missing_field(where, at + name, value, inside + AS_IT_IS, first)
            if not isinstance(value, dict):
                raise _not_text(value, at.removesuffix("."), where)
            values.append(value[name])
        at += name
        if each:
            if wrong := [value for value in values if not isinstance(value, list | None)]:
                raise _not_text(wrong[0], at, where)
            values = [value for inner in values for value in inner or []]
            at += "[]"
        found = values
        at += "."
    return b"".join(_bytes_of(value, field, where) for value in found)


def _bytes_of(value: object, field: str, where: str) -> bytes:
    if value is None:
        return b""
    if not isinstance(value, str):
        raise _not_text(value, field, where)
    try:
        text = value.encode()
    except UnicodeEncodeError:
        raise MemspanError(f"{where}: {field} has half a surrogate pair: correct it") from None
    # Without it, memory that is carried on would meet two documents as one line.
    return text if text.endswith(b"\n") or not text else text + b"\n"


def _not_text(value: object, field: str, where: str) -> MemspanError:
    """The error for a value, with the path to a text inside it if it has one."""
    path = _path_to_text(value, field)
    inside = f", whose texts may be {path}" if path not in (None, field) else ""
    kind = type(value).__name__
    return MemspanError(f"{where}: {field} is of type {kind}, not text{inside}: {NAME_IT}")


def _path_to_text(value: object, path: str) -> str | None:
    """The path to a text inside a value, by the names that chats have or the first."""
    while isinstance(value, list | dict) and value:
        if isinstance(value, list):
            value = value[0]
            path += "[]"
        else:
            texts = (name for name, inner in value.items() if isinstance(inner, str))
            names = ("content", "value", "text", *texts, *value)
            name = next(name for name in names if name in value)
            value = value[name]
            path += f".{name}"
    return path if isinstance(value, str) else None


def missing_field(
    where: str, field: str, known: Iterable[object], instead: str = "", first: bool = True
) -> MemspanError:
    """The error for a record without the field. ``first``: it is the file's first record."""
    names = ", ".join(repr(name)[:60] for name in list(known)[:20]) or "none"
    kind = MissingFieldError if first else MemspanError
    return kind(f"{where} has no {field!r}; it has {names}: {NAME_IT}{instead}")


def suffix_of(path: Path) -> str:
    """The suffix that says what a file holds, such as ``.csv``, compressed or not."""
    return Path(name_inside(path)).suffix


def _json_lines(path: Path, field: str) -> Iterator[bytes]:
    with open_text(path) as file:
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
    return record_text(record, field, where, first=number == 1)


def _json(path: Path, field: str) -> Iterator[bytes]:
    """A list of objects, or one object after the other."""
    try:
        with open_text(path) as file:
            for number, record in enumerate(_values(file, path), 1):
                where = f"{path}, record {number:,}"
                if not isinstance(record, dict):
                    raise MemspanError(
                        f"{where} is not a JSON object: give a list of objects such as "
                        f"{{{json.dumps(field)}: ...}}{AS_IT_IS}"
                    )
                yield record_text(record, field, where, first=number == 1)
    except UnicodeDecodeError as error:
        raise MemspanError(f"{path} is not UTF-8 ({error.reason}): convert it") from None


def _values(file: IO[bytes], path: Path) -> Iterator[Any]:
    """The elements of a list, or values one after the other, with few in memory."""
    decoder = json.JSONDecoder()
    utf8 = codecs.getincrementaldecoder("utf-8-sig")()
    text = ""
    at = 0
    number = 0
    size = CHUNK
    ended = False
    listed = None
    while True:
        at = re.compile(r"[ \t\r\n,]*").match(text, at).end()  # type: ignore[union-attr]
        if listed is None and at < len(text):
            listed = text[at] == "["
            at += listed
            continue
        if at < len(text) and listed and text[at] == "]":
            return
        if ended and at == len(text) and not listed:
            return
        try:
            value, at = decoder.raw_decode(text, at)
        except RecursionError:
            raise MemspanError(f"{path}, record {number + 1:,} is nested too deep") from None
        except ValueError as error:
            left = len(text) - at
            if ended or left > LINE_LIMIT:
                reason = (
                    getattr(error, "msg", error) if ended else f"over {LINE_LIMIT:,} characters"
                )
                raise MemspanError(
                    f"{path}, record {number + 1:,} is not JSON ({reason}): correct it{AS_IT_IS}"
                ) from None
            chunk = file.read(size)
            ended = not chunk
            # An incomplete record is parsed again: twice as much each time.
            text = text[at:] + utf8.decode(chunk, final=ended)
            at = 0
            size = 2 * size
        else:
            yield value
            number += 1
            size = CHUNK


RECORDS = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
}
"""Readers of files of records, one document each, by suffix."""


def damaged(path: Path, error: Exception) -> MemspanError:
    """The error for a file that cannot be read to its end."""
    reason = next(iter(str(error).splitlines()), "no reason given")[:200].rstrip(". ")
    return MemspanError(f"{path} is cut short or damaged ({reason}): get the file again")
