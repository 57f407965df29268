"""Source files as HTML. A file is highlighted whole and then cut, so that a line inside a string or a
comment keeps its colour. Line numbers are counted by the style sheet, and tokens that have no colour
have no markup: so the pages that show most code stay small.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.token import Comment, Keyword, Name, Number, Operator, String, _TokenType
from pygments.util import ClassNotFound

from docsite.code import ROOT, Lines, read
from docsite.folds import Run

COLOURED = (
    (Keyword, "k"),
    (Operator.Word, "k"),
    (Comment, "c"),
    (String.Doc, "c"),
    (String, "s"),
    (Number, "m"),
    (Name.Function, "nf"),
    (Name.Class, "nf"),
)
"""Kinds of tokens, and the class of the theme that has their colour."""


@cache
def highlighted(path: Path) -> list[str]:
    """Each line of a file as HTML."""
    try:
        lexer = get_lexer_for_filename(path.name, stripnl=False)
    except ClassNotFound:
        lexer = TextLexer(stripnl=False)
    lines = [""]
    for colour, text in _joined(
        (_colour(kind), text) for kind, text in lexer.get_tokens(read(path))
    ):
        for n, part in enumerate(text.split("\n")):
            if n:
                lines.append("")
            blank = part[: len(part) - len(part.lstrip())]
            if colour and part.strip():
                part = (
                    f"{blank}<i class={colour}>{html.escape(part[len(blank) :], quote=False)}</i>"
                )
            else:
                part = html.escape(part, quote=False)
            lines[-1] += part
    return lines[:-1] if not lines[-1] else lines


def _colour(kind: _TokenType) -> str:
    return next((colour for of, colour in COLOURED if kind in of), "")


def _joined(tokens: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Neighbours of one colour as one."""
    before = ""
    so_far = ""
    for colour, text in tokens:
        if colour != before:
            yield before, so_far
            before = colour
            so_far = ""
        so_far += text
    yield before, so_far


def listing(path: Path, runs: list[Run], root: Path = ROOT) -> str:
    """Lines of a file, with their numbers; those that are not open are in boxes that open."""
    every = read(root / path).splitlines()
    shown = [every[n - 1] for run in runs for n in run.numbers]
    margin = min((len(line) - len(line.lstrip()) for line in shown if line.strip()), default=0)
    coloured = highlighted(root / path)
    parts = []
    for run in runs:
        lines = [re.sub(rf"^ {{{margin}}}", "", coloured[n - 1]) for n in run.numbers]
        block = _block(lines, run.low)
        if not run.is_open:
            lines_are = f"{run.low} to {run.high}" if len(lines) > 1 else str(run.low)
            block = f"<details><summary>lines {lines_are}</summary>{block}</details>"
        parts.append(block)
    return "".join(parts)


def rest(path: str, runs: list[Run], root: Path = ROOT) -> str:
    """Lines of a file that no passage shows, in one box that opens."""
    n_lines = sum(len(run.numbers) for run in runs)
    n_all = len(read(root / path).splitlines())
    name = html.escape(path.removeprefix("src/memspan/"))
    blocks = "".join(listing(Path(path), [Run(run.low, run.high, True)], root) for run in runs)
    return (
        f"<details><summary><code>{name}</code>: {n_lines} of its {n_all} lines</summary>"
        f"{blocks}</details>"
    )


def heading(lines: Lines, first: int, source_page: str) -> str:
    """Above a listing: the symbol, with a link to the file's page."""
    title = html.escape(lines.place.symbol or Path(lines.place.path).name)
    where = html.escape(lines.place.path.removeprefix("src/memspan/"))
    return (
        f'<p class="where"><a href="{source_page}#L{first}">{title}</a> '
        f"<span>{where}:{first}</span></p>"
    )


def whole_file(path: Path) -> str:
    """A file's page: every line can be linked to as ``#L12``."""
    return _block(highlighted(path), 1, with_anchors=True)


def _block(lines: list[str], first: int, with_anchors: bool = False) -> str:
    # A line is a box, which wraps with its number beside it: its end belongs inside.
    code = "".join(
        f"<span id=L{n}>{line}\n</span>" if with_anchors else f"<span>{line}\n</span>"
        for n, line in enumerate(lines, first)
    )
    start = f' style="counter-reset:n {first - 1}"' if first > 1 else ""
    return f'<pre class="highlight" tabindex="0"{start}><code>{code}</code></pre>'
