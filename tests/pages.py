"""The code of documentation pages."""

from __future__ import annotations

import re
from pathlib import Path


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of the fenced blocks that are to be run."""
    return re.findall(r"^```(python|sh)\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)
