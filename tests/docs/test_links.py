"""Pages link to, name and draw existing things: files, headings, rooms of the package, symbols."""

from __future__ import annotations

import os
import re
from pathlib import Path

import house
from docsite.code import ROOT, symbols
from docsite.links import tabs

PAGES = [
    *ROOT.glob("*.md"),
    *(page for folder in ("benchmarks", "docs", "src") for page in (ROOT / folder).rglob("*.md")),
]
HOUSE = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
"""The page for contributors."""


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Anchors of its headings, as on GitHub: lower case, no punctuation, words joined by hyphens."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_they_lead_somewhere() -> None:
    broken = []
    known = {page: anchors(page) for page in PAGES}
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
    """A page of docs/ is in the navigation, whose tabs have at most twelve, or names at its top the
    page that it belongs to, which links back. Those of the reference are listed by their generator."""
    named = [page for pages in tabs().values() for page in pages]
    assert max(map(len, tabs().values())) <= 12
    lost = []
    for page in {*(ROOT / "docs").rglob("*.md")} - {*(ROOT / "docs/reference").glob("*.md")}:
        top = page.read_text(encoding="utf-8").split("\n\n")[1]
        parents = [page.parent / link for link in re.findall(r"\]\(([^)#]+\.md)", top)]
        part = top.startswith(("*Part of [", "**Under the hood** of [")) and any(
            re.search(rf"{page.name}[)#]", parent.read_text(encoding="utf-8")) for parent in parents
        )
        if str(page.relative_to(ROOT / "docs")) not in named and not part:
            lost.append(str(page.relative_to(ROOT)))
    assert not lost


def shown(picture: str) -> tuple[list[str], list[int]]:
    """Boxes, names of rooms and folders, and their lines, each in order."""
    texts = re.findall(r'<text class="\w" [^>]*middle">([^\d<]*)([\d,]*)<', picture)
    boxes = re.findall(r'<rect class="room" [^>]+>', picture)
    lines = [int(number.replace(",", "")) for _, number in texts if number]
    return [*boxes, *(name for name, _ in texts)], lines


def test_the_picture_of_the_house_is_of_today() -> None:
    """The same rooms and folders in the same layers, with their lines to a tenth."""
    kept = shown(house.PICTURE.read_text(encoding="utf-8"))
    now = shown(house.drawn())
    pairs = zip(kept[1], now[1], strict=True) if kept[0] == now[0] else [(0, 100)]
    assert all(abs(old - new) <= max(20, new / 10) for old, new in pairs), "draw it: make house"


def test_every_room_is_drawn_and_explained() -> None:
    drawn = {room for layer in house.layers() for room in layer}
    assert drawn == {*house.rooms()} - {"__init__", "lab"}
    layout = HOUSE[HOUSE.index("    src/memspan") : HOUSE.index("    tests/ ")]
    missing = [room for room in drawn - {"__main__"} if not re.search(rf"\b{room}(/|\.py)", layout)]
    assert not missing


def test_files_and_symbols_are_there() -> None:
    named = re.findall(r"`([\w./-]+\.(?:py|c|h|toml))(?::([\w.]+))?`", HOUSE)
    assert len(named) > 100
    gone = []
    for name, symbol in named:
        paths = [path for path in (ROOT / "src/memspan" / name, ROOT / name) if path.is_file()]
        # Of some names there are many files.
        many = name in ("config.py", "options.py", "config.toml") or "NAME" in name
        if not many and not (paths and (not symbol or symbol in symbols(paths[0]))):
            gone.append(f"{name}:{symbol}")
    assert not gone
