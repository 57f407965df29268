"""The page for contributors: its picture is the package's, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import house
from docsite.code import ROOT, symbols

PAGE = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
PACKAGE = Path("src/memspan")
GENERAL = ("config.py", "options.py", "config.toml")
"""Names of files that there are many of."""


def shown(picture: str) -> tuple[list[str], list[int]]:
    """Boxes, names of rooms and folders, and their lines, each in order."""
    texts = re.findall(r'<text class="\w" [^>]*middle">([^\d<]*)([\d,]*)<', picture)
    boxes = re.findall(r'<rect class="room" [^>]+>', picture)
    lines = [int(number.replace(",", "")) for _, number in texts if number]
    return [*boxes, *(name for name, _ in texts)], lines


def test_the_picture_is_of_today() -> None:
    """The same rooms and folders in the same layers, with their lines to a tenth."""
    kept, now = shown(house.PICTURE.read_text(encoding="utf-8")), shown(house.drawn())
    pairs = zip(kept[1], now[1], strict=True) if kept[0] == now[0] else [(0, 100)]
    assert all(abs(old - new) <= max(20, new / 10) for old, new in pairs), "draw it: make house"


def test_every_room_is_drawn_and_explained() -> None:
    drawn = {room for layer in house.layers() for room in layer}
    assert drawn == {*house.rooms()} - {"__init__"}
    layout = PAGE[PAGE.index("    src/memspan") : PAGE.index("    tests/ ")]
    missing = [room for room in drawn - {"__main__"} if not re.search(rf"\b{room}(/|\.py)", layout)]
    assert not missing


def test_what_it_names_is_there() -> None:
    named = re.findall(r"`([\w./-]+\.(?:py|c|h|toml))(?::([\w.]+))?`", PAGE)
    assert len(named) > 100
    gone = []
    for name, symbol in named:
        path = ROOT / (PACKAGE / name if (ROOT / PACKAGE / name).is_file() else name)
        general = name in GENERAL or "NAME" in name
        if not general and not (path.is_file() and (not symbol or symbol in symbols(path))):
            gone.append(f"{name}:{symbol}")
    assert not gone
