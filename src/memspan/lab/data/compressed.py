"""Compressed files, recognised by name and opened as their content."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from memspan.errors import MemspanError, counted

ARCHIVES = (".tar", ".tgz", ".tbz2", ".txz", ".7z", ".rar", ".npz")
"""Suffixes of files that hold several files."""
DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)


def name_inside(path: Path) -> str:
    """The name that tells a file's content: ``a.csv`` for ``a.csv.gz``; for a ``.zip``, that of the
    only file in it."""
    name = path.name.lower()
    if name.endswith(".zip"):
        try:
            with zipfile.ZipFile(path) as archive:
                (member,) = _members(archive)
            return member.lower()
        # Opening it says what is wrong.
        except (ValueError, NotImplementedError, *DAMAGED):
            return name.removesuffix(".zip")
    return next((name.removesuffix(end) for end in OPENED if name.endswith(end)), name)


def is_compressed(path: Path) -> bool:
    """True if a file's name says that it is compressed and holds one text."""
    return path.name.lower().endswith((*OPENED,)) and not is_archive(path)


def is_archive(path: Path) -> bool:
    """True if a file's name says that it holds several files."""
    return name_inside(path).endswith(ARCHIVES)


def is_damage(error: Exception) -> bool:
    """True for errors of reading a file that is truncated or damaged."""
    # Zstandard's error is defined in a module that may be missing.
    return isinstance(error, DAMAGED) or type(error).__name__ == "ZstdError"


def open_text(path: Path) -> IO[bytes]:
    """Open a file, or the text that is compressed in it.

    Raises:
        MemspanError: a package is missing; a ``.zip`` holds several files, or is encrypted.
        Exception: it is damaged, see :func:`is_damage`; also while it is read.
    """
    name = path.name.lower()
    read = next((each for end, each in OPENED.items() if name.endswith(end)), open)
    return read(path, "rb")


def _zip(path: Path, mode: str) -> IO[bytes]:
    archive = zipfile.ZipFile(path)
    members = _members(archive)
    if len(members) != 1:
        raise MemspanError(
            f"{path} holds {counted(len(members), 'file')}: unpack it, and give the folder"
        )
    try:
        return archive.open(members[0])
    # Encrypted, or compressed in a way that Python does not know.
    except (RuntimeError, NotImplementedError) as error:
        raise MemspanError(f"{path} cannot be unpacked ({error}): unpack it yourself") from None


def _members(archive: zipfile.ZipFile) -> list[str]:
    """The files of an archive, without those that macOS adds."""
    names = (member.filename for member in archive.infolist() if not member.is_dir())
    return [name for name in names if not name.startswith("__MACOSX/")]


def _zstandard(path: Path, mode: str) -> IO[bytes]:
    for library in ("compression.zstd", "zstandard"):
        try:
            module = __import__(library, fromlist=["open"])
        except ImportError:
            continue
        file: IO[bytes] = module.open(path, mode)
        return file
    raise MemspanError(
        f"{path} is compressed by Zstandard, which needs Python 3.14 or zstandard: pip install "
        "zstandard, or unpack it"
    )


OPENED: dict[str, Callable[[Path, str], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".lzma": lzma.open,
    ".zst": _zstandard,
    ".zip": _zip,
}
"""Functions that open a file, by the end of its name."""
