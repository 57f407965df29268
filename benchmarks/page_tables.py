"""Pages of docs/ with parts that a script writes from results files, each between two comments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def rewritten(page: Path, parts: dict[str, str]) -> str:
    """The page with its parts made anew, by name."""
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        before, begin, rest = text.partition(f"<!-- {name}: ")
        comment, _, rest = rest.partition("\n")
        _, end, after = rest.partition("<!-- to here -->")
        assert begin, f"{page.name} has no place for {name}"
        assert end, f"{page.name}: {name} has no end"
        text = f"{before}{begin}{comment}\n{part.rstrip()}\n{end}{after}"
    return text


def write(page: Path, parts: dict[str, str]) -> None:
    """Write the page, and print what was written into it."""
    page.write_text(rewritten(page, parts), encoding="utf-8")
    for part in parts.values():
        print(part, end="\n\n")
    print(f"written: {page}")


def markdown(rows: Sequence[Sequence[object]]) -> str:
    """A table, its header first."""
    header, *rest = rows
    lines = [header, ["---"] * len(header), *rest]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
