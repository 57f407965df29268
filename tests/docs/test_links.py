"""Links in the repository's Markdown lead to files and headings, as GitHub names them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from docsite.code import ROOT
from docsite.links import navigation

PAGES = [
    *ROOT.glob("*.md"),
    *(page for folder in ("benchmarks", "docs", "src") for page in (ROOT / folder).rglob("*.md")),
]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Of its headings: in lower case, without punctuation, words joined by hyphens."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_they_lead_somewhere() -> None:
    broken, known = [], {page: anchors(page) for page in PAGES}
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            name, _, anchor = link.partition("#")
            there = Path(os.path.normpath(page.parent / name)) if name else page
            if re.match(r"[a-z]+:|\{", link):
                continue
            if not there.exists() or (anchor and anchor not in known.get(there, {anchor})):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken, "\n".join(broken)


def test_every_page_has_its_place() -> None:
    """A page of docs/ is one of at most thirty in the navigation, or names at its top the page that it
    belongs to, which links back."""
    named = navigation()
    assert len(named) <= 30
    lost = []
    for page in (ROOT / "docs").rglob("*.md"):
        if str(page.relative_to(ROOT / "docs")) in named:
            continue
        top = page.read_text(encoding="utf-8").split("\n\n")[1]
        parents = [page.parent / link for link in re.findall(r"\]\(([^)#]+\.md)", top)]
        linked = [parent.read_text(encoding="utf-8") for parent in parents]
        labelled = top.startswith(("*Part of [", "**Under the hood** of ["))
        if not labelled or not any(re.search(rf"{page.name}[)#]", text) for text in linked):
            lost.append(str(page.relative_to(ROOT)))
    assert not lost
