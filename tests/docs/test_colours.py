"""Pictures are legible on a phone and have one colour for each concept, told apart by all readers."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from docsite import colours, figures
from docsite.code import ROOT

PICTURES = sorted(path for pattern in colours.PICTURES for path in ROOT.glob(pattern))
MOVING = sorted((ROOT / figures.FOLDER).glob("*.svg"))
ANY = re.compile(r"#[0-9A-Fa-f]{3,8}\b|\brgba?\(|\bhsla?\(")
STYLE = ROOT / "docs/docsite/style"
SCRIPTS = sorted({*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").glob("*.py")})
SEEN = {
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}
"""What is left of linear red, green and blue (Machado, Oliveira and Fernandes 2009)."""


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_has_todays_colours_and_no_others(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not ANY.search(colours.BLOCK.sub("", text))
    names = {*re.findall(r"var\(--([\w-]+)\)", text)}
    assert names <= {*colours.variables("light")}
    assert colours.block(names) in text


@pytest.mark.parametrize("path", [*PICTURES, *MOVING], ids=lambda path: path.stem)
def test_a_picture_is_legible_on_a_phone(path: Path) -> None:
    """At 340 pixels, letters are 11 pixels high; moving figures have today's colours, too."""
    text = path.read_text(encoding="utf-8")
    assert colours.coloured(text) == text, "make figures"
    width = float(re.search(r'viewBox="0 0 ([\d.]+)', text)[1])
    sizes = re.findall(r"font(?:-size)?: ?([\d.]+)px", text)
    assert min(map(float, sizes)) * 340 / width >= 11


def test_figures_and_plots_name_no_colours_of_their_own() -> None:
    for path in (STYLE / "figures.css", STYLE / "figures.js"):
        assert not ANY.search(path.read_text(encoding="utf-8").replace("&#$", ""))
    for path in SCRIPTS:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"#[0-9A-Fa-f]{6}\b|[\"']C\d|f\"C\{|tab:", text), path


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tones_are_read_on_paper_and_ink_on_fills(scheme: str) -> None:
    found = colours.variables(scheme)
    for name in colours.CONCEPTS:
        assert colours.contrast(found[name], found["paper"]) >= colours.READABLE
        assert colours.contrast(found["ink"], found[f"{name}-fill"]) >= colours.READABLE


@pytest.mark.parametrize("kind", [None, *SEEN])
@pytest.mark.parametrize("names", [colours.CONCEPTS, colours.ARCHITECTURES])
def test_colour_blind_readers_tell_them_apart(names: dict[str, str], kind: str | None) -> None:
    looks = {name: lab(linear(colour), kind) for name, colour in names.items()}
    for (a, x), (b, y) in itertools.combinations(looks.items(), 2):
        distance = sum((p - q) ** 2 for p, q in zip(x, y, strict=True)) ** 0.5
        assert distance > 10, (a, b, distance)


def linear(colour: str) -> list[float]:
    shares = (n / 255 for n in bytes.fromhex(colour[1:]))
    return [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares]


def lab(rgb: list[float], kind: str | None) -> list[float]:
    """CIE L*a*b* of what such a reader sees, of linear sRGB under D65."""
    if kind:
        rgb = [max(0.0, sum(a * b for a, b in zip(row, rgb, strict=True))) for row in SEEN[kind]]
    to_xyz = (
        (0.4124 / 0.9505, 0.3576 / 0.9505, 0.1805 / 0.9505),
        (0.2126, 0.7152, 0.0722),
        (0.0193 / 1.089, 0.1192 / 1.089, 0.9505 / 1.089),
    )
    x, y, z = (sum(a * b for a, b in zip(row, rgb, strict=True)) for row in to_xyz)
    x, y, z = (n ** (1 / 3) if n > 0.008856 else 7.787 * n + 16 / 116 for n in (x, y, z))
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]
