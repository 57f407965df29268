"""Decide which lines of a page's code stand open and which are folded: none is left out.

A passage shows its symbol whole. The signature and docstring, which has the shapes, and the lines
that its block names are open, and whatever lies between them is folded in its place. What no passage's
symbol holds of a file that the page covers is folded at the page's end, file by file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from docsite.code import ROOT, Lines, Place, heads, read, symbols

SHORT = 4
"""So few lines inside a passage are not worth a fold."""


@dataclass(frozen=True)
class Run:
    """Lines that follow one another, counted from 1, both ends included."""

    low: int
    high: int
    is_open: bool

    @property
    def numbers(self) -> range:
        return range(self.low, self.high + 1)


@dataclass(frozen=True)
class Shown:
    """A page's code."""

    places: list[Lines]
    passages: list[list[Run]]
    """Source of each place, in order."""
    rest: dict[str, list[Run]]
    """Lines of each covered file that are in no passage."""

    def of(self, path: str) -> list[Run]:
        """A file's lines in passages."""
        both = zip(self.places, self.passages, strict=True)
        return [run for lines, runs in both if lines.place.path == path for run in runs]

    def folded(self, path: str) -> list[Run]:
        """A file's lines that are not open."""
        return [*(run for run in self.of(path) if not run.is_open), *self.rest[path]]


def shown(
    places: list[Lines], covers: Iterable[str], left_out: Iterable[Place] = (), root: Path = ROOT
) -> Shown:
    """Give every line of the covered files, and of the symbols that passages name, its place.

    Args:
        places: the page's passages.
        covers: files that are shown whole.
        left_out: symbols that stay at the page's end, even inside a class that has a passage.
        root: the repository.
    """
    is_open = [_numbers(lines.ranges) for lines in places]
    taken: dict[str, set[int]] = {}
    for lines, numbers in zip(places, is_open, strict=True):
        taken[lines.place.path] = taken.get(lines.place.path, set()) | numbers
    for n, head in enumerate(_heads(places, root)):
        is_open[n] |= head - taken[places[n].place.path]
        taken[places[n].place.path] |= head
    for place in left_out:
        own = _numbers([symbols(root / place.path)[place.symbol]])
        taken[place.path] = taken.get(place.path, set()) | own
    folded = _owned(places, taken, root)
    passages = [
        _runs(is_open[n], folded[n], has_text=_text_lines(lines.place.path, root))
        for n, lines in enumerate(places)
    ]
    code = Shown(places, passages, {})
    for path in covers:
        text = _text_lines(path, root)
        inside = {number for run in code.of(path) for number in run.numbers}
        every = set(range(1, len(read(root / path).splitlines()) + 1))
        runs = _runs(set(), every - inside, text)
        code.rest[path] = [run for run in runs if text.intersection(run.numbers)]
    return code


def _heads(places: list[Lines], root: Path) -> list[set[int]]:
    """Signature and docstring of each passage's symbol, once for each symbol."""
    seen: set[tuple[str, str]] = set()
    found: list[set[int]] = []
    for lines in places:
        path = lines.place.path
        symbol = lines.place.symbol
        name = (path, symbol)
        known = heads(root / path) if symbol and lines.place.spans and name not in seen else {}
        seen.add(name)
        found.append(_numbers([known[symbol]] if symbol in known else []))
    return found


def _owned(places: list[Lines], taken: dict[str, set[int]], root: Path) -> list[set[int]]:
    """The lines that each passage folds: of the smallest symbol around them that a passage names, the
    first passage of that symbol that has an open line further down."""
    owned: list[set[int]] = [set() for _ in places]
    around: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for n, lines in enumerate(places):
        path = lines.place.path
        if lines.place.symbol:
            low, high = symbols(root / path)[lines.place.symbol]
            for number in {*range(low, high + 1)} - taken[path]:
                around.setdefault((path, number), []).append((high - low, n))
    for (_, number), passages in around.items():
        of_smallest = [n for size, n in passages if size == min(passages)[0]]
        later = (n for n in of_smallest if places[n].ranges[-1][1] >= number)
        owned[next(later, of_smallest[-1])].add(number)
    return owned


def _runs(is_open: set[int], folded: set[int], has_text: set[int]) -> list[Run]:
    """Lines as runs, without empty ones around them; short folds within are opened."""
    runs: list[Run] = []
    both = is_open | folded
    first = min(both & has_text, default=1)
    last = max(both & has_text, default=0)
    for number in sorted(number for number in both if first <= number <= last):
        kind = number in is_open
        if runs and runs[-1].high == number - 1 and runs[-1].is_open == kind:
            runs[-1] = Run(runs[-1].low, number, kind)
        else:
            runs.append(Run(number, number, kind))
    if not is_open:
        return runs
    hidden = [run.numbers for run in runs if not run.is_open]
    short = [numbers for numbers in hidden if len(has_text.intersection(numbers)) < SHORT]
    opened = {number for numbers in short for number in numbers}
    return _runs(is_open | opened, folded - opened, has_text) if opened else runs


def _text_lines(path: str, root: Path) -> set[int]:
    return {n for n, line in enumerate(read(root / path).splitlines(), 1) if line.strip()}


def _numbers(ranges: Iterable[tuple[int, int]]) -> set[int]:
    return {number for low, high in ranges for number in range(low, high + 1)}
