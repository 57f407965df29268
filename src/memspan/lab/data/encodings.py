"""Guesses about files by their first bytes: encodings of text, and formats that are not text."""

from __future__ import annotations

import codecs

KANA = "".join(map(chr, range(0x3041, 0x30FF)))
HANZI = "的一是不了在人有我他中来上大和地到以要就出可也你生能而子那得下自之年"
CYRILLIC = "оеаинтсрвл"
WESTERN = "éèàçùäöüßñáíóúêôâîåøæÄÖÜÉ\u2019\u2018\u201c\u201d\u201e\u2013\u2014\u2026«»°"
POLISH = "ąćęłńóśźż"
CZECH = "áčďéěíňóřšťúůýžäôľĺŕ"
HUNGARIAN = "áéíóöőúüű"
LATIN = 0.7
COMMON = (
    ("CP932", KANA, 0.3),
    ("EUC-JP", KANA, 0.3),
    ("GB18030", HANZI + "们这为国说时会对于", 0.12),
    ("BIG5", HANZI + "們這為國說時會對於", 0.12),
    ("CP949", "이다는의에가을고지하기를한도로은사", 0.15),
    ("CP1251", CYRILLIC, 0.5),
    ("KOI8-R", CYRILLIC, 0.5),
    ("CP1253", "αοιετνσηρπκ", 0.6),
    ("CP1255", "יוהלאמרתב", 0.4),
    ("CP1252", WESTERN, LATIN),
    ("CP1254", WESTERN + "ışğİŞĞ", LATIN),
    *(
        (name, common, LATIN)
        for common in (POLISH, CZECH, HUNGARIAN)
        for name in ("CP1250", "ISO-8859-2")
    ),
)
"""Encodings, characters that are common in their texts, and the least share of these beyond ASCII."""
MIXED = ("CP932", "EUC-JP", "GB18030", "BIG5")
"""Encodings whose texts may have more letters of ASCII than others."""
UNKNOWN = "another encoding"
"""A text that is not UTF-8, nor surely of one of :data:`COMMON`."""
FOREIGN = (
    (b"%PDF-", "a PDF", "convert it first (pdftotext)"),
    (
        b"PK\x03\x04",
        "a zip archive, as files of Word, Excel and EPUB are",
        "take the text out of it",
    ),
    (b"\x1f\x8b", "compressed by gzip", "add .gz to its name"),
    (b"\xfd7zXZ\0", "compressed by xz", "add .xz to its name"),
    (b"\x28\xb5\x2f\xfd", "compressed by Zstandard", "add .zst to its name"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it"),
    (b"Rar!\x1a\x07", "a RAR archive", "unpack it"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a file of Microsoft Office", "save it as plain text"),
    (b"\x93NUMPY", "an array of NumPy", "add .npy to its name"),
    (b"SQLite format 3\0", "a data base", "export its texts as CSV"),
    (b"ARROW1\0\0", "an Arrow file", "save it as Parquet"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", "save its texts as JSON Lines"),
)
"""First bytes of a file, its kind, and the remedy."""


def encoding_of(start: bytes) -> str | None:
    """Guess the encoding of a text that is not UTF-8 from its first bytes; None: UTF-8, or no text.

    A hint, not more: UTF-16 by its byte order mark or by the zeros beside Latin letters, others by
    :data:`COMMON`; :data:`UNKNOWN` if none of them fits.
    """
    if start.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "UTF-32"
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16"
    if b"\0" in start:
        first, second = (start[half::2].count(0) / max(len(start[half::2]), 1) for half in (0, 1))
        # Without a byte order mark the name has to say the order: nobody can convert "UTF-16".
        if first < 0.1 and second > 0.4:
            return "UTF-16LE"
        return "UTF-16BE" if second < 0.1 and first > 0.4 else None
    try:
        # The first bytes may end inside a character.
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        if not is_text(start):
            return None
        fits = [_fit(start, *each) for each in COMMON]
        return COMMON[fits.index(max(fits))][0] if max(fits) >= 1 else UNKNOWN
    return None


def is_text(start: bytes) -> bool:
    """True if a file's first bytes may be text, in an encoding other than UTF-16 and UTF-32."""
    # No text has other control characters, whatever its encoding.
    return not (set(range(32)) - set(b"\t\n\r\f\x1b")) & set(start)


def _fit(text: bytes, name: str, common: str, least: float) -> float:
    """The share of common characters, over the least that a text of that encoding has."""
    try:
        read = codecs.getincrementaldecoder(name)().decode(text)
    except UnicodeDecodeError:
        return 0.0
    others = [c for c in read if not c.isascii()]
    # Accents are few among plain letters; the letters of a script of its own are not.
    n_plain = sum(c.isascii() and c.isalpha() for c in read)
    if name not in MIXED and (n_plain > len(others)) != (least == LATIN):
        return 0.0
    return sum(map(set(common).__contains__, others)) / max(len(others), 1) / least


def encoding_hint(what: str, start: bytes) -> str | None:
    """A line that says that ``what`` is not UTF-8, and how to convert it; None: it is, or is no text.

    Args:
        what: the name of a file or a prompt in the line.
        start: its first bytes, of which some are quoted, so that the reader can judge the guess.
    """
    encoding = encoding_of(start)
    if encoding is None:
        return None
    looks, convert = described(what, encoding, start)
    return f"{looks}, and its bytes are read as they are: if that is not meant, {convert} first"


def described(what: str, encoding: str, start: bytes) -> tuple[str, str]:
    """Describe a text's encoding, and the command that converts it, for a message."""
    if encoding == UNKNOWN:
        return f"{what} is not UTF-8", "convert it (iconv -f ENCODING -t UTF-8 FILE)"
    read = codecs.getincrementaldecoder(encoding)(errors="replace").decode(start)
    first = next((n for n, c in enumerate(read) if not c.isascii() and c != "\ufeff"), 0)
    sample = " ".join(read[max(first - 10, 0) : first + 20].split())
    looks = f'{what} looks like {encoding} ("{sample}"), not UTF-8'
    return looks, f"convert it (iconv -f {encoding} -t UTF-8 FILE)"


def foreign_format(start: bytes) -> tuple[str, str] | None:
    """A format that holds text, if any, in a form that cannot be read here, by a file's first bytes:
    what it is, and what to do."""
    if start.startswith(b"BZh") and start[4:10] == b"1AY&SY":
        return "compressed by bzip2", "add .bz2 to its name"
    if start[257:262] == b"ustar":
        return "a tar archive", "unpack it, and give the folder"
    if start.startswith(b"PAR1") and b"\0" in start:
        return "a Parquet file", "add .parquet to its name"
    return next(
        ((what, remedy) for magic, what, remedy in FOREIGN if start.startswith(magic)), None
    )
