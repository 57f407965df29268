"""Style of the documentation's plots: narrow enough for a phone, a colour for each architecture."""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "docs"))
from docsite import colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 4.5
FONT = 10.5
"""Inches and points: on a screen of 390 pixels letters are 11 pixels high."""
LINES = {
    "transformer-xl": ("-", "o"),
    "compressive": ((0, (6, 1.5)), "s"),
    "feedback": ((0, (5, 1.5, 1, 1.5)), "^"),
    "fast-weights": ("-", "D"),
    "gated-delta-net": ((0, (3, 1)), "v"),
    "sliding-window": ((0, (1, 1)), "P"),
    "transformer": ((0, (1, 1.5)), "X"),
    "lstm": ((0, (5, 1, 1, 1, 1, 1)), "p"),
    "mamba-2": ((0, (2, 1)), "*"),
    "kda": ("-", "s"),
    "gla": ((0, (5, 1.5, 1, 1.5)), "^"),
    "retention": ((0, (1, 1.5)), "X"),
    "delta-product": ((0, (4, 1, 1, 1)), "h"),
    "gated-delta-net-2": ((0, (1, 1)), "P"),
    "rwkv-7": ((0, (6, 1.5)), "<"),
    "rmt": ((0, (4, 1.5)), ">"),
    "armt": ((0, (2, 2)), "d"),
    "infini": ((0, (3, 2)), "8"),
}
"""Dashes and markers: colours are never all that tells lines apart."""
VARIANTS = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)), (0, (2, 2)))
MARKERS = "oXs^v"


def look(architecture: str, variant: int = 0) -> dict[str, Any]:
    """Style of an architecture's line; variants of one share its colour in darker shades."""
    dashes, marker = LINES[architecture]
    colour = (colours.ARCHITECTURES | colours.RECENT)[architecture]
    if variant:
        dashes = VARIANTS[variant]
        marker = MARKERS[variant]
        colour = colours.mixed(colour, colours.NEUTRAL["light"]["ink"], 1 - 0.2 * variant)
    return {"color": colour, "linestyle": dashes, "marker": marker, "markersize": 4.5}


def panels(n: int, height: float = 2.9, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure of ``n`` panels, one above the other."""
    import matplotlib
    from matplotlib.figure import Figure

    ink = colours.NEUTRAL["light"]["ink"]
    line = colours.NEUTRAL["light"]["line"]
    matplotlib.rcParams.update(
        {"font.size": FONT, "axes.titlesize": FONT, "legend.fontsize": FONT, "lines.linewidth": 1.8}
        | {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}
        | {"text.color": ink, "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink}
        | {"grid.color": line, "grid.linewidth": 0.6, "axes.edgecolor": ink}
    )
    figure = Figure(figsize=(WIDTH, n * height), layout="constrained")
    return figure, list(figure.subplots(n, squeeze=False, **options)[:, 0])


def name_lines(figure: Figure, axes: Axes, columns: int = 2) -> None:
    """A legend above all panels, where it covers no line."""
    handles, names = axes.get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside upper left", ncols=columns, frameon=False,
        handlelength=2.6, columnspacing=1.2,
    )  # fmt: skip


def save(figure: Figure, path: Path) -> None:
    """Write the picture for light pages and, as ``NAME-dark.png``, for dark ones.

    In few colours, which makes them small.
    """
    from PIL import Image

    for place in (path, path.with_stem(f"{path.stem}-dark")):
        if place != path:
            _darken(figure)
        drawn = BytesIO()
        figure.savefig(drawn, format="png", dpi=160)
        Image.open(drawn).convert("RGB").quantize(96).save(place, optimize=True)
        print(f"written: {place}")


def _darken(figure: Figure) -> None:
    """Give everything in a figure its colour on a dark page."""
    from matplotlib.artist import Artist
    from matplotlib.colors import to_hex, to_rgba

    dark = colours.NEUTRAL["dark"]
    neutral = {own.lower(): dark[name] for name, own in colours.NEUTRAL["light"].items()}
    neutral[to_hex("black")] = dark["ink"]
    # A figure's paper is its own and its patch's: what has been turned stays.
    neutral |= {own.lower(): own for own in dark.values()}

    def turned(colour: Any) -> tuple[float, ...]:
        *_, alpha = to_rgba(colour)
        name = to_hex(colour)
        tone = neutral.get(name) or colours.readable(name, dark["ink"], dark["paper"])
        return to_rgba(tone, alpha)

    for artist in figure.findobj(Artist):
        for part in ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor"):
            get = getattr(artist, f"get_{part}", None)
            change = getattr(artist, f"set_{part}", None)
            if get is None or change is None:
                continue
            found = get()
            many = len(found) and not isinstance(found, str) and hasattr(found[0], "__len__")
            if many:
                change([turned(colour) for colour in found])
            elif len(found):
                change(turned(found))
