"""Remarks about files of a corpus that are read although something may be wrong with them."""

from __future__ import annotations

from collections.abc import Iterable

from memspan.errors import counted
from memspan.lab.data.encodings import encoding_hint, is_text
from memspan.lab.data.texts import Text
from memspan.lab.data.tokenizers.base import NotUtf8Error, decoded

START = 8192
"""Bytes from which an encoding is guessed."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def remarks_on_files(texts: Iterable[Text]) -> list[str]:
    """A line for each kind of remark, about the first file that it is true of and the number of others.

    Args:
        texts: whole files, or what is unpacked from them.
    """
    lines: dict[str, tuple[str, int]] = {}
    for text in texts:
        for kind, line in _remarks(text).items():
            first, others = lines.get(kind, (line, -1))
            lines[kind] = first, others + 1
    return [
        line + (f"; and so are {counted(others, 'other file')}" if others else "")
        for line, others in lines.values()
    ]


def _remarks(text: Text) -> dict[str, str]:
    """Remarks about a file, by kind."""
    start = text.part(0, START).read()
    bad = 0 if b"\0" in start else first_bad_byte(text)
    if bad is not None:
        sample = around(text, bad)
        hint = encoding_hint(text.name, sample)
        if hint is not None:
            return {"encoding": hint}
        if not is_text(sample):
            return {
                "binary": f"{text.name} is not text, and its bytes are read as they are (ids of tokens "
                "are read from a .npy)"
            }
    found = []
    if start.startswith(BYTE_ORDER_MARK):
        found.append("begins with a byte order mark")
    if b"\r\n" in start:
        found.append("ends its lines with CR LF, as on Windows")
    if not found:
        return {}
    both = " and ".join(found)
    return {both: f"{text.name} {both}, which is kept: dos2unix FILE removes it"}


def first_bad_byte(text: Text) -> int | None:
    """The position of the first byte that is not UTF-8, if any."""
    try:
        for _ in decoded(text.chunks()):
            pass
    except NotUtf8Error as error:
        return error.position
    return None


def around(text: Text, position: int) -> bytes:
    """Some bytes of a text, with those at ``position``, from which its encoding may be guessed."""
    if position < START // 2:
        return text.part(0, START).read()
    part = text.part(position - START // 2, position + START // 2).read()
    # From a line's beginning, which no character crosses.
    return part[part.find(b"\n", 0, START // 2) + 1 :]


def remarks_on_records(name: str, documents: list[Text]) -> list[str]:
    """The records without a text, if any, of a file or data set."""
    n_empty = sum(not len(document) for document in documents)
    if not n_empty:
        return []
    are = "has" if n_empty == 1 else "have"
    return [f"{n_empty:,} of {counted(len(documents), 'record')} of {name} {are} no text"]
