"""Lines of the source that a page names by file, symbol and text.

A place is written as a path from the repository's root, a symbol in it, and spans of lines::

    src/memspan/models/relative/backbone.py: RelativeBackbone.forward
    from: codes =
    to: hidden =

``from`` is part of a line inside the symbol, the first that has it; ``to`` is part of the first line
from there on, itself included. Without ``to`` the span is one line, without spans all of the symbol,
without a symbol all of the file. Several spans follow one another.
"""

from __future__ import annotations

import ast
import hashlib
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from docsite.errors import DocsError

ROOT = Path(__file__).parents[2]
"""The repository."""


@dataclass(frozen=True)
class Place:
    """Part of a source file."""

    path: str
    """From the repository's root."""
    symbol: str
    """``Class.method`` (empty: the whole file)."""
    spans: tuple[tuple[str, str], ...] = ()
    """Text of the first and of the last line of each (none: all of the symbol)."""

    def __str__(self) -> str:
        return f"{self.path}: {self.symbol}" if self.symbol else self.path

    @property
    def key(self) -> str:
        """Names the place among a page's, spans included."""
        return " | ".join([str(self), *(f"{first} … {last}" for first, last in self.spans)])


@dataclass(frozen=True)
class Lines:
    """Source that a place stands for today. Lines count from 1, both ends included."""

    place: Place
    ranges: tuple[tuple[int, int], ...]
    text: str
    """Its lines, without their common indentation."""

    @property
    def digest(self) -> str:
        """Changes when the code does, whatever is above it in the file or around it."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def parse_place(text: str) -> Place:
    """The place that a block of a page names.

    Raises:
        DocsError: it is not written as in this module's docstring.
    """
    head, *rest = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    path, _, symbol = head.partition(":")
    spans: list[tuple[str, str]] = []
    for line in rest:
        word, _, part = line.partition(":")
        part = part.strip()
        if part and word == "from":
            spans.append((part, part))
        elif part and word == "to" and spans:
            spans[-1] = (spans[-1][0], part)
        else:
            raise DocsError(f"{head}: {line!r} is not 'from: TEXT', or 'to: TEXT' after one")
    return Place(path.strip(), symbol.strip(), tuple(spans))


def find(place: Place, root: Path = ROOT) -> Lines:
    """The lines of a place.

    Raises:
        DocsError: the file, the symbol or a span's text is gone.
    """
    lines = read(root / place.path).splitlines()
    first = 1
    last = len(lines)
    if place.symbol:
        known = symbols(root / place.path)
        if place.symbol not in known:
            raise DocsError(f"{place.path} has no {place.symbol}: name what took its place")
        first, last = known[place.symbol]
    ranges = []
    start = first
    for begins, ends in place.spans:
        low = _line_with(begins, lines, start, last, place)
        high = low if ends == begins else _line_with(ends, lines, low, last, place)
        ranges.append((low, high))
        start = high + 1
    ranges = ranges or [(first, last)]
    text = "\n".join("\n".join(lines[low - 1 : high]) for low, high in ranges)
    return Lines(place, tuple(ranges), textwrap.dedent(text))


def _line_with(text: str, lines: list[str], first: int, last: int, place: Place) -> int:
    for number in range(first, last + 1):
        if text in lines[number - 1]:
            return number
    raise DocsError(f"{place}: no line from {first} to {last} has {text!r}")


@cache
def symbols(path: Path) -> dict[str, tuple[int, int]]:
    """Classes, functions, methods, and names assigned at the top, with their first and last lines."""
    found = {}
    for name, node in _definitions(_tree(path), ""):
        decorators = [d.lineno for d in getattr(node, "decorator_list", [])]
        assert node.end_lineno is not None
        found[name] = (min([node.lineno, *decorators]), node.end_lineno)
    return found


def heads(path: Path) -> dict[str, tuple[int, int]]:
    """Signatures with their docstrings: first and last lines, of classes and functions."""
    found = {}
    for name, node in _definitions(_tree(path), ""):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            documented = ast.get_docstring(node, clean=False) is not None
            last = node.body[0].end_lineno if documented else node.body[0].lineno - 1
            assert last is not None
            found[name] = symbols(path)[name][0], last
    return found


def public_functions(path: Path) -> dict[str, int]:
    """Functions and methods without an underscore in their name, with the line of their ``def``."""
    return {
        name: node.lineno
        for name, node in _definitions(_tree(path), "")
        if isinstance(node, ast.FunctionDef)
        and not any(part.startswith("_") for part in name.split("."))
    }


def _definitions(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield prefix + child.name, child
        if isinstance(child, ast.ClassDef):
            yield from _definitions(child, f"{prefix}{child.name}.")
        targets = child.targets if isinstance(child, ast.Assign) else []
        if isinstance(child, ast.AnnAssign):
            targets = [child.target]
        for target in targets:
            if isinstance(target, ast.Name):
                yield prefix + target.id, child


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(read(path))


@cache
def read(path: Path) -> str:
    """A file's text.

    Raises:
        DocsError: there is no such file.
    """
    if not path.is_file():
        raise DocsError(f"no file {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    return path.read_text(encoding="utf-8")
