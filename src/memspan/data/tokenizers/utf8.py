"""Text that comes in chunks: decoded, and cut where no token can cross."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterable, Iterator

from memspan.errors import MemspanError


def utf8(text: bytes) -> str:
    """Decode a whole text."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(error.start) from None


def decoded(chunks: Iterable[bytes]) -> Iterator[str]:
    """Decode UTF-8 in chunks, which may end inside a character."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    n_bytes = 0
    for chunk in itertools.chain(chunks, [b""]):
        begun = len(decoder.getstate()[0])
        try:
            yield decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise _not_utf8(n_bytes - begun + error.start) from None
        n_bytes += len(chunk)


def cut_at_gaps(texts: Iterable[str], gaps: str = " \t\n") -> Iterator[str]:
    """The same text in pieces that end where a gap begins; a text without gaps is one piece.

    ``gaps``: characters that are one where they stand alone.
    """
    held: list[str] = []
    rest = ""
    for text in texts:
        rest += text
        gap = _last_gap(rest, gaps)
        if gap is not None:
            yield "".join([*held, rest[:gap]])
            held, rest = [], rest[gap:]
        else:
            # Whether the text ends in a gap depends on the next character.
            held.append(rest[:-2])
            rest = rest[-2:]
    if held or rest:
        yield "".join([*held, rest])


def _last_gap(text: str, gaps: str) -> int | None:
    """Position of the last single one of ``gaps``, which are white space, between other characters.

    Neither a word nor the pattern by which byte-level BPE splits a text (Radford et al. 2019) crosses
    its left edge.
    """
    for n in range(len(text) - 2, 0, -1):
        if text[n] in gaps and not (text[n - 1].isspace() or text[n + 1].isspace()):
            return n
    return None


def _not_utf8(position: int) -> MemspanError:
    return MemspanError(
        f"the text is not UTF-8 (byte {position:,}): convert it, or train with --data.tokenizer bytes"
    )


def bytes_of(text: str) -> bytes:
    """The text in UTF-8, with the bytes of arguments that were not UTF-8 as they were."""
    try:
        return text.encode("utf-8", errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise MemspanError(
            f"the text has half a surrogate pair, {text[error.start]!a}, at character {error.start}: "
            "correct it"
        ) from None
