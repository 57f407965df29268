"""Links between pages of the repository, as they are on GitHub, and on the site.

Pages link to one another, to source files and to folders by relative paths. On the site a source
file is a page with numbered lines, and a folder a list of its files.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from docsite.code import ROOT

COPIED = (".svg", ".png", ".json")
"""Files that stand on the site as they are."""
FOLDERS = Path("benchmarks/README.md"), Path("examples/notebooks/README.md")
"""Pages about a folder that stand in the navigation."""
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s]+)(\))|((?:src|href)=\")([^\"]+)(\")")


def place(path: Path, root: Path = ROOT) -> PurePosixPath:
    """Place of a repository file among the site's Markdown.

    ``docs/`` is the site's root; other files are under ``source/``.
    """
    if path.parts[0] == "docs" and path.suffix in (".md", *COPIED):
        return PurePosixPath(*path.parts[1:])
    if path.suffix == ".md" and len(path.parts) == 1:
        return PurePosixPath(path.name.lower())
    if path in FOLDERS:
        return PurePosixPath(path.parent, "index.md")
    if path.suffix in COPIED:
        return PurePosixPath(path)
    if path.suffix == ".ipynb":
        return PurePosixPath(path).with_suffix(".md")
    if (root / path).is_dir():
        return PurePosixPath("source", path, "index.md")
    if path.suffix == ".md":
        return PurePosixPath("source", path)
    return PurePosixPath("source", f"{path}.md")


def navigation() -> list[str]:
    """Places of the pages that the site's navigation names."""
    return [page for pages in tabs().values() for page in pages]


def tabs() -> dict[str, list[str]]:
    """The same, by tab."""

    def walk(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        children = entry.values() if isinstance(entry, dict) else entry
        return [page for child in children for page in walk(child)]

    settings = Path(__file__).with_name("zensical.toml").read_text(encoding="utf-8")
    tabs = tomllib.loads(settings)["project"]["nav"]
    return {name: walk(entry) for tab in tabs for name, entry in tab.items()}


def rewritten(
    text: str, page: Path, at: PurePosixPath, linked: Callable[[Path], None], root: Path = ROOT
) -> str:
    """A page's Markdown with links as the site needs them; one to nowhere is named and left out.

    Args:
        text: the page.
        page: its path from the repository's root.
        at: its place on the site.
        linked: called with every file or folder of the repository that is linked to.
        root: the repository.
    """

    def replace(match: re.Match[str]) -> str:
        before, target, after = (g for g in match.groups() if g is not None)
        if re.match(r"[a-z]+:|#|//", target):
            return match[0]
        name, _, anchor = target.partition("#")
        path = Path(os.path.normpath(page.parent / name))
        if not (root / path).exists():
            print(f"broken link: {page} links to {target}, which is not there")
            return re.sub(r"!?\[(.*)\]\(", r"\1", before) if after == ")" else match[0]
        linked(path)
        there = relative(place(path, root), at)
        return f"{before}{there}{'#' * bool(anchor)}{anchor}{after}"

    return outside_fences(text, lambda part: LINK.sub(replace, part))


def relative(target: PurePosixPath, at: PurePosixPath) -> str:
    """The link to one page of the site from another."""
    return os.path.relpath(target, at.parent)


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """A page with its parts changed, but for fenced code."""
    parts: list[tuple[bool, str]] = []
    fence = ""
    for line in text.splitlines(keepends=True):
        opening = re.match(r"\s*(```+|~~~+)", line)
        inside = bool(fence) or opening is not None
        if parts and parts[-1][0] == inside:
            parts[-1] = (inside, parts[-1][1] + line)
        else:
            parts.append((inside, line))
        if fence and line.strip() == fence:
            fence = ""
        elif not fence and opening:
            fence = opening[1]
    return "".join(part if fenced else change(part) for fenced, part in parts)
