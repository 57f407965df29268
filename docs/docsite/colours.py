"""One colour for each concept, in every figure, picture and plot of the documentation.

They are those of Okabe and Ito (2008), which colour-blind readers tell apart; plots tell lines apart by
dashes and markers besides. What is drawn on paper of either scheme is derived here: a tone that can be
read on it, and a fill that ink can be read on.
"""

from __future__ import annotations

import re
from pathlib import Path

CONCEPTS = {
    "segment": "#F0E442",
    "memory": "#0072B2",
    "compressed": "#E69F00",
    "feedback": "#009E73",
    "matrix": "#D55E00",
    "decay": "#CC79A7",
    "reading": "#56B4E9",
    "none": "#5F5F5F",
}
"""Tokens of the segment; slots of memory; compressed slots; memory vectors that are fed back; fast
weights; their decay; what attention or a query reads; no memory."""
ARCHITECTURES = {
    "transformer-xl": CONCEPTS["memory"],
    "compressive": CONCEPTS["compressed"],
    "feedback": CONCEPTS["feedback"],
    "fast-weights": CONCEPTS["matrix"],
    "gated-delta-net": CONCEPTS["decay"],
    "sliding-window": CONCEPTS["reading"],
    "transformer": CONCEPTS["none"],
    "lstm": "#000000",
    "mamba-2": "#332288",
}
"""Each has the colour of what is its own."""
RECENT = {
    "kda": "#9000F0",
    "gla": "#A8A878",
    "retention": "#603060",
    "delta-product": "#A80000",
    "gated-delta-net-2": "#56B4E9",
    "rwkv-7": "#E69F00",
    "rmt": "#601818",
    "armt": "#9060F0",
    "infini": "#A84860",
}
"""Colours of today's memories, in a picture with Transformer-XL and other older ones."""
NEUTRAL = {
    "light": {
        "ink": "#1F2328",
        "soft": "#59636E",
        "faint": "#8C959F",
        "line": "#D0D7DE",
        "panel": "#EEF1F5",
        "paper": "#FFFFFF",
    },
    "dark": {
        "ink": "#E6EDF3",
        "soft": "#9198A1",
        "faint": "#6E7681",
        "line": "#3D444D",
        "panel": "#212830",
        "paper": "#0D1117",
    },
}
FILLS = {"light": 0.5, "dark": 0.4}
"""Share of a colour that a fill has, on paper."""
READING = {"light": 1.0, "dark": 0.55}
"""The same of what is read."""
READABLE = 4.5
"""The contrast that text needs at least (WCAG 2.1)."""
BLOCK = re.compile(r"svg\{[^}]*\}\n@media \(prefers-color-scheme: dark\) \{\nsvg\{[^}]*\}\n\}\n")
"""Where a picture has its colours."""
PICTURES = ("docs/*.svg", "docs/annotated/pictures/*.svg", "docs/path/*.svg")


def variables(scheme: str) -> dict[str, str]:
    """CSS variables of a scheme: neutral ones, and for each concept its tone and its fill."""
    neutral = NEUTRAL[scheme]
    ink = neutral["ink"]
    paper = neutral["paper"]
    found = dict(neutral)
    for name, colour in CONCEPTS.items():
        found[name] = readable(colour, ink, paper)
        found[f"{name}-fill"] = mixed(colour, paper, FILLS[scheme])
    # Shades of it tell how much, so the full one is as strong as ink can be read on.
    found["reading-fill"] = mixed(CONCEPTS["reading"], paper, READING[scheme])
    return found


def css(light: str, dark: str) -> str:
    """All variables, for these selectors."""
    return f"{_rule(light, variables('light'))}\n{_rule(dark, variables('dark'))}\n"


def block(used: set[str]) -> str:
    """The colours of a picture that stands alone, in the scheme that the reader's system asks for."""
    light, dark = (
        _rule("svg", {name: value for name, value in variables(scheme).items() if name in used})
        for scheme in ("light", "dark")
    )
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"


def coloured(picture: str) -> str:
    """A picture with today's colours."""
    used = {*re.findall(r"var\(--([\w-]+)\)", picture)}
    return BLOCK.sub(block(used), picture, count=1)


def write_pictures(root: Path) -> None:
    """Give every picture that was drawn by hand today's colours."""
    for pattern in PICTURES:
        for path in root.glob(pattern):
            path.write_text(coloured(path.read_text(encoding="utf-8")), encoding="utf-8")


def mixed(a: str, b: str, share: float) -> str:
    """``share`` of colour ``a``, the rest ``b``."""
    pairs = zip(_numbers(a), _numbers(b), strict=True)
    return "#" + "".join(f"{round(share * x + (1 - share) * y):02X}" for x, y in pairs)


def readable(colour: str, ink: str, paper: str) -> str:
    """The colour with as little ink as makes it readable on paper."""
    shares = (1 - i / 20 for i in range(21))
    tones = (mixed(colour, ink, share) for share in shares)
    return next(tone for tone in tones if contrast(tone, paper) >= READABLE)


def contrast(a: str, b: str) -> float:
    """The ratio of luminances, from 1 to 21 (WCAG 2.1)."""
    low, high = sorted(map(_luminance, (a, b)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    linear = (
        x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4
        for x in (n / 255 for n in _numbers(colour))
    )
    return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _numbers(colour: str) -> tuple[int, int, int]:
    red, green, blue = bytes.fromhex(colour.removeprefix("#"))
    return red, green, blue


def _rule(selector: str, values: dict[str, str]) -> str:
    return f"{selector}{{{';'.join(f'--{name}:{value}' for name, value in values.items())}}}"
