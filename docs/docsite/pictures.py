"""SVG pictures in the colours that the reader has chosen on the site.

A picture has its dark colours under ``@media (prefers-color-scheme: dark)``, which is right on GitHub.
The site has a switch of its own, which such a query does not see, so there it is two pictures.
"""

from __future__ import annotations

import re
from pathlib import Path

DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{\n(.*?)\n\}\n", re.S)


def variants(stem: str, path: Path) -> dict[str, str]:
    """The picture's light and its dark file, by name."""
    text = path.read_text(encoding="utf-8")
    return {
        f"{stem}-light.svg": DARK.sub("", text),
        f"{stem}-dark.svg": DARK.sub(r"\1\n", text),
    }


def by_scheme(text: str) -> str:
    """A page's Markdown with both files of each SVG picture, of which one is shown."""
    return re.sub(
        r"(!\[[^\]]*\]\([^)]+)\.svg\)",
        r"\1-light.svg#only-light)\1-dark.svg#only-dark)",
        text,
    )
