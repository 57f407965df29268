"""Pictures are legible on a phone and have one colour for each concept, told apart by all readers."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from docsite import colours, figures
from docsite.code import ROOT

PICTURES = sorted(path for pattern in colours.PICTURES for path in ROOT.glob(pattern))
MOVING = sorted((ROOT / figures.FOLDER).glob("*.svg"))
ANY = re.compile(r"#[0-9A-Fa-f]{3,8}\b|\brgba?\(|\bhsla?\(")
STYLE = ROOT / "docs/docsite/style"
SCRIPTS = sorted({*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").glob("*.py")})
SEEN = {
    None: np.eye(3),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}
"""Rest of linear red, green and blue (Machado, Oliveira and Fernandes 2009)."""
OLDER = ("transformer-xl", "fast-weights", "gated-delta-net", "mamba-2")
TODAY = colours.RECENT | {name: colours.ARCHITECTURES[name] for name in OLDER}
"""All lines of one picture."""
XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
"""Matrix of linear sRGB; under D65 white is their sums."""


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


@pytest.mark.parametrize("kind", SEEN)
@pytest.mark.parametrize("names", [colours.CONCEPTS, colours.ARCHITECTURES, TODAY])
def test_colour_blind_readers_tell_them_apart(names: dict[str, str], kind: str | None) -> None:
    for (a, x), (b, y) in itertools.combinations(names.items(), 2):
        distance = np.linalg.norm(lab(x, kind) - lab(y, kind))
        assert distance > 10, (a, b, distance)


def lab(colour: str, kind: str | None) -> np.ndarray:
    """CIE L*a*b* of what such a reader sees."""
    share = np.frombuffer(bytes.fromhex(colour[1:]), np.uint8) / 255
    rgb = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    xyz = XYZ @ np.clip(SEEN[kind] @ rgb, 0, None) / np.sum(XYZ, 1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])
