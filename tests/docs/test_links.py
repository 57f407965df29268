"""Links in the repository's Markdown lead to files and headings, as GitHub names them."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
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
