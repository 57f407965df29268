"""English of the pages."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from docsite import links
from docsite.code import ROOT

PER_THOUSAND = 4
"""Times that prose of native writers says "what" at most."""


def pages() -> list[Path]:
    """The sources of the pages, without those that are generated."""
    in_menu = []
    for name in links.navigation():
        places = (ROOT / "docs" / name, ROOT / Path(name).with_name("README.md"))
        in_menu += [place for place in places if place.is_file()][:1]
    return list(dict.fromkeys([*in_menu, *sorted((ROOT / "docs").rglob("*.md"))]))


def prose(text: str) -> list[str]:
    """The words of a page, without its code, formulas and addresses."""
    kept: list[str] = []

    def keep(part: str) -> str:
        kept.append(part)
        return part

    links.outside_fences(text, keep)
    words = re.sub(r"\]\([^)]*\)|`[^`]*`|\$[^$]*\$|<[^>]+>", " ", "".join(kept))
    return re.findall(r"[A-Za-z][\w'\u2019]*", words)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_says_what_seldom(page: Path) -> None:
    """Nearly always a noun says the same as a clause: "the write" for "what is written"."""
    words = prose(page.read_text(encoding="utf-8"))
    said = [i for i, word in enumerate(words) if word.lower() == "what"]
    most = math.ceil(PER_THOUSAND * len(words) / 1000)
    assert len(said) <= most, [" ".join(words[max(0, i - 4) : i + 5]) for i in said]
