"""Lessons, and annotated pages: notes beside the code that they explain.

A page is ``docs/lessons/NAME.md`` or ``docs/annotated/NAME.md``, ordinary Markdown with maths between
dollars. Five kinds of fenced block mean something of their own:

``code``
    A place in the source (see `docsite.code`). It begins a passage: what follows, up to the next such
    block, heading or rule (``---``), is the note set beside that code.
``covers``
    The files, one a line, which this page shows whole, with a note for every public function. What no
    passage shows is folded where this block stands (see `docsite.folds`).
``left-out``
    Those that have none: ``PATH: Symbol: why``, one a line.
``file``
    A program, whole, with what it imports from its neighbours (see `docsite.standalone`).
``measured-span``
    An architecture's name: the span measured for it, or that there is no measurement yet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from docsite.code import ROOT, Lines, Place, find, parse_place
from docsite.errors import DocsError
from docsite.folds import Run, shown
from docsite.standalone import standalone

FOLDER = Path("docs/annotated")
LESSONS = Path("docs/lessons")


@dataclass(frozen=True)
class Block:
    """Part of a page: prose, or a fenced block."""

    kind: str
    """``prose``, ``heading`` (also a rule), or the word after the fence."""
    text: str


@dataclass
class Page:
    """An annotated page, taken apart."""

    path: Path
    """From the repository's root."""
    blocks: list[Block]
    places: list[Lines] = field(default_factory=list)
    """Places of its passages, in order."""
    covers: list[str] = field(default_factory=list)
    left_out: dict[Place, str] = field(default_factory=dict)
    """Why there is no note."""


def pages(root: Path = ROOT) -> list[Page]:
    """All annotated pages, by name."""
    return [
        read_page(path.relative_to(root), root) for path in sorted((root / FOLDER).glob("*.md"))
    ]


def read_page(path: Path, root: Path = ROOT) -> Page:
    """Take a page apart and find its code.

    Raises:
        DocsError: a block is not as it should be, or names code that is gone; begins with the page.
    """
    page = Page(path, list(_blocks((root / path).read_text(encoding="utf-8"))))
    try:
        for block in page.blocks:
            if block.kind == "code":
                page.places.append(find(parse_place(block.text), root))
            elif block.kind == "covers":
                page.covers += block.text.split()
            elif block.kind == "left-out":
                page.left_out |= dict(_left_out(line) for line in block.text.strip().splitlines())
    except DocsError as error:
        raise DocsError(f"{path}: {error}") from None
    return page


def _left_out(line: str) -> tuple[Place, str]:
    parts = [part.strip() for part in line.split(":", 2)]
    if len(parts) < 3 or not all(parts):
        raise DocsError(f"{line!r} is not 'PATH: Symbol: why'")
    return Place(parts[0], parts[1]), parts[2]


def _blocks(text: str) -> Iterator[Block]:
    """A page as prose, headings and our fenced blocks; other fenced blocks are prose."""
    kept: list[str] = []
    fence = kind = ""
    for line in text.splitlines():
        opening = re.match(r"(```+|~~~+)([\w-]*)", line)
        if fence:
            kept.append(line)
            if line.strip() == fence:
                fence = ""
                if kind:
                    yield Block(kind, "\n".join(kept[:-1]))
                    kept = []
                    kind = ""
        elif opening:
            fence = opening[1]
            if opening[2] in ("code", "covers", "file", "left-out", "measured-span"):
                yield Block("prose", "\n".join(kept))
                kept = []
                kind = opening[2]
            else:
                kept.append(line)
        elif re.match(r"#+ |---\s*$", line):
            yield Block("prose", "\n".join(kept))
            yield Block("heading", "" if line.startswith("-") else line)
            kept = []
        else:
            kept.append(line)
    if fence:
        raise DocsError(f"a block that begins with {fence} does not end")
    yield Block("prose", "\n".join(kept))


def in_columns(
    page: Page,
    listing: Callable[[Lines, list[Run]], str],
    rest: Callable[[str, list[Run]], str],
    measured: Callable[[str], str],
    root: Path = ROOT,
) -> str:
    """The page as Markdown with two columns in it.

    Args:
        page: the page.
        listing: the HTML of a passage's code.
        rest: the HTML of what no passage shows of a file.
        measured: the sentence for an architecture's measured span.
        root: the repository.
    """
    whole = shown(page.places, page.covers, page.left_out, root)
    passages = zip(page.places, whole.passages, strict=True)
    parts: list[str] = []
    code = ""
    note: list[str] = []

    def finish() -> None:
        nonlocal code
        if code:
            parts.append(_passage("\n\n".join(note), code))
            code = ""
        else:
            parts.extend(note)
        note.clear()

    for block in page.blocks:
        if block.kind == "code":
            finish()
            code = listing(*next(passages))
        elif block.kind == "heading":
            finish()
            parts.append(block.text)
        elif block.kind == "prose":
            note.append(block.text)
        elif block.kind == "measured-span":
            note.append(measured(block.text.strip()))
        elif block.kind == "file":
            note.append(f"```python\n{standalone(block.text.strip(), root)}```")
        elif block.kind == "covers":
            finish()
            parts += [rest(path, whole.rest[path]) for path in block.text.split()]
        elif block.kind == "left-out":
            note.append(
                "\n".join(f"- `{place.symbol}`: {why}" for place, why in page.left_out.items())
            )
    finish()
    return "\n\n".join(parts)


def _passage(note: str, code: str) -> str:
    return (
        '<div class="passage" markdown="block">\n'
        f'<div class="note" markdown="block">\n\n{note.strip()}\n\n</div>\n{code}\n</div>'
    )
