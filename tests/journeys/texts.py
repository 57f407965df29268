"""Texts as users have them: of lengths that fill no segment, of one line, of no characters at all."""

from __future__ import annotations

import random
from pathlib import Path

PROSE = (
    "What a piece of work is a man! How noble in reason, how infinite in faculty!\n"
    "In form and moving how express and admirable, in action how like an angel.\n\n"
)


def prose(length: int) -> str:
    """So many characters."""
    return (PROSE * (length // len(PROSE) + 1))[:length]


TEXTS: dict[str, tuple[bytes, ...]] = {
    **{f"{n}-characters": (prose(n).encode(),) for n in (0, 1, 60, 107, 369, 5000)},
    "one-line": (prose(2000).replace("\n", " ").encode(),),
    "no-text": (random.Random(1).randbytes(700),),
    "several": (
        prose(300).encode(),
        "Où est la bibliothèque ? 図書館\n".encode(),
        prose(90).encode(),
    ),
}
"""Name -> its parts: prompts one after the other, or files of one folder."""


def corpus(name: str, folder: Path) -> Path:
    """The text as a file or, if it has several parts, as a folder of files."""
    parts = TEXTS[name]
    path = folder / name
    if len(parts) == 1:
        path = path.with_suffix(".txt")
        path.write_bytes(parts[0])
        return path
    path.mkdir(exist_ok=True)
    for n, part in enumerate(parts):
        (path / f"{n}.txt").write_bytes(part)
    return path
