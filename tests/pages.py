"""The code of documentation pages."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from memspan.lab import cli


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of the fenced blocks that are to be run."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^```(python|sh)\n(.*?)^```", text, re.S | re.M)
    # A command may go on in the next line.
    return [(language, re.sub(r" \\\n *", " ", block)) for language, block in found]


def run(page: Path) -> dict[str, Any]:
    """The names that its Python leaves; its commands of memspan are run, too, in order."""
    names: dict[str, Any] = {}
    for language, block in blocks(page):
        if language == "python":
            exec(compile(block, str(page), "exec"), names)
        for line in block.splitlines() if language == "sh" else []:
            if line.startswith("memspan"):
                cli.main(shlex.split(line)[1:])
    return names
