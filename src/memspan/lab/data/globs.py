"""Paths that match a pattern; links cannot lead in circles."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path


def find_matches(pattern: str) -> Iterator[str]:
    """Paths that match ``pattern``, as of :func:`glob.glob` with ``recursive=True``, each once.

    ``**`` enters each folder once, whatever links lead to it; :func:`glob.glob` follows a link to a
    folder above it forty times, and two of them for ever.
    """
    path = Path(pattern)
    root = Path(path.anchor)
    parts = path.parts[1:] if path.anchor else path.parts
    yield from dict.fromkeys(_matches(str(root) if path.anchor else "", parts))


def _matches(folder: str, parts: Sequence[str]) -> Iterator[str]:
    if not parts:
        yield folder
        return
    part, *rest = parts
    if part == "**":
        for each in _folders(folder):
            yield from _matches(each, rest) if rest else _matches(each, ["*"])
    elif not glob.has_magic(part):
        path = os.path.join(folder, part)
        if os.path.lexists(path):
            yield from _matches(path, rest)
    else:
        for name in fnmatch.filter(_names(folder), part):
            if part.startswith(".") or not name.startswith("."):
                yield from _matches(os.path.join(folder, name), rest)


def _folders(folder: str) -> Iterator[str]:
    """A folder and all below it, without hidden ones."""
    entered = set()
    waiting = [folder]
    while waiting:
        each = waiting.pop()
        place = os.path.realpath(each)
        if place in entered:
            continue
        entered.add(place)
        yield each
        inside = (os.path.join(each, name) for name in _names(each) if not name.startswith("."))
        waiting += sorted(filter(os.path.isdir, inside), reverse=True)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder or os.curdir)
    # No folder, or one that cannot be read.
    except (OSError, ValueError):
        return []
