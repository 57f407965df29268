"""Source files as lines of HTML. A file is highlighted whole and then cut, so that a line inside a
string or a comment keeps its colour."""

from __future__ import annotations

import html
import re
from functools import cache
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

from docsite.code import ROOT, Lines, read


@cache
def highlighted(path: Path) -> list[str]:
    """Each line of a file as HTML, with Pygments' short class names."""
    try:
        lexer = get_lexer_for_filename(path.name, stripnl=False)
    except ClassNotFound:
        lexer = TextLexer(stripnl=False)
    # Pygments closes and opens the spans of a token at every line's end.
    text = highlight(read(path), lexer, HtmlFormatter(nowrap=True))
    return text.rstrip("\n").split("\n")


def listing(lines: Lines, source_page: str, root: Path = ROOT) -> str:
    """A block of code with its line numbers, and a link to the file's page above it."""
    every = highlighted(root / lines.place.path)
    first = lines.ranges[0][0]
    dedent = _dedent(lines, root)
    rows = []
    for n, (low, high) in enumerate(lines.ranges):
        if n and low > lines.ranges[n - 1][1] + 1:
            rows.append('<span class="gap">⋯</span>')
        for number in range(low, high + 1):
            code = re.sub(rf"^((?:<[^>]+>)*) {{{dedent}}}", r"\1", every[number - 1])
            rows.append(f'<span class="line" data-line="{number}">{code}</span>')
    code = "\n".join(rows)
    title = html.escape(lines.place.symbol or Path(lines.place.path).name)
    where = html.escape(lines.place.path.removeprefix("src/memspan/"))
    return (
        f'<div class="listing"><p class="where"><a href="{source_page}#L{first}">{title}</a> '
        f"<span>{where}:{first}</span></p>\n"
        f'<pre class="highlight" tabindex="0"><code>{code}</code></pre></div>'
    )


def whole_file(path: Path) -> str:
    """A file's page: every line can be linked to as ``#L12``."""
    rows = [
        f'<span class="line" id="L{n}" data-line="{n}">{line}</span>'
        for n, line in enumerate(highlighted(path), 1)
    ]
    code = "\n".join(rows)
    return f'<pre class="highlight whole" tabindex="0"><code>{code}</code></pre>'


def _dedent(lines: Lines, root: Path) -> int:
    every = read(root / lines.place.path).splitlines()
    shown = [every[n - 1] for low, high in lines.ranges for n in range(low, high + 1)]
    return min((len(line) - len(line.lstrip()) for line in shown if line.strip()), default=0)
