"""Pictures in the colours that the reader has chosen on the site.

A picture has its dark colours under ``@media (prefers-color-scheme: dark)``, which is right on GitHub.
The site has a switch of its own, which such a query does not see, so there it is two pictures.
A plot is drawn twice, as NAME.png and NAME-dark.png.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{\n(.*?)\n\}\n", re.S)


def variants(stem: str, path: Path) -> dict[str, str]:
    """The picture's light and its dark file, by name."""
    text = path.read_text(encoding="utf-8")
    return {
        f"{stem}-light.svg": DARK.sub("", text),
        f"{stem}-dark.svg": DARK.sub(r"\1\n", text),
    }


def by_scheme(text: str, at: PurePosixPath, root: Path) -> str:
    """A page's Markdown with both files of each picture that has two, of which one is shown.

    Args:
        text: the page, its links as on the site.
        at: its place there.
        root: the repository, where a plot's dark file lies beside it.
    """
    folders = root / "docs" / at.parent, root / at.parent

    def both(match: re.Match[str]) -> str:
        opening, place, kind = match.groups()
        if kind == "svg":
            light = f"{place}-light"
        elif any((folder / f"{place}-dark.png").is_file() for folder in folders):
            light = place
        else:
            return match[0]
        return f"{opening}{light}.{kind}#only-light){opening}{place}-dark.{kind}#only-dark)"

    return re.sub(r"(!\[[^\]]*\]\()([^)]+)\.(svg|png)\)", both, text)
