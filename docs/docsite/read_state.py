"""Find code that has changed since its note was last read.

``docs/annotated/read.json`` has a digest of the code beside each note, as it was when somebody last
read both. The build lists what differs now; ``make docs-read`` accepts the present state after reading.
"""

from __future__ import annotations

import json
from pathlib import Path

from docsite.annotated import FOLDER, Page
from docsite.code import ROOT

FILE = FOLDER / "read.json"


def changed(pages: list[Page], root: Path = ROOT) -> list[str]:
    """A line for each passage whose code is not as it was."""
    was = _read(root)
    return [
        f"{page.path}: {lines.place} has {'changed' if known else 'not been read'}"
        for page in pages
        for lines in page.places
        if (known := was.get(page.path.stem, {}).get(lines.place.key)) != lines.digest
    ]


def recorded(root: Path = ROOT) -> set[tuple[str, str]]:
    """Pages and places that were read at some time."""
    return {(page, key) for page, keys in _read(root).items() for key in keys}


def _read(root: Path) -> dict[str, dict[str, str]]:
    path = root / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def accept(pages: list[Page], root: Path = ROOT) -> None:
    """Record that all notes have been read beside the code as it is."""
    now = {
        page.path.stem: {lines.place.key: lines.digest for lines in page.places} for page in pages
    }
    text = json.dumps(now, indent=1, ensure_ascii=False)
    (root / FILE).write_text(text + "\n", encoding="utf-8")
