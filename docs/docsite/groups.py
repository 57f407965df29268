"""The groups of names on a page of the reference, as ``docs/reference/NAME.md`` has them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from docsite.errors import DocsError


@dataclass(frozen=True)
class Group:
    """Names that are used together."""

    title: str
    names: tuple[str, ...]
    text: str
    """Links and an example, as Markdown."""


def groups(path: Path) -> list[Group]:
    """Read the groups of a page's names, in their order.

    Raises:
        DocsError: a group does not begin with its names.
    """
    found = []
    for section in re.split(r"^## ", path.read_text(encoding="utf-8"), flags=re.M)[1:]:
        title, _, rest = section.partition("\n\n")
        listed, _, text = rest.partition("\n\n")
        if re.sub(r"`\w+`", "", listed).strip():
            raise DocsError(f"{path.name}: the names of {title!r} are to stand between backticks")
        found.append(Group(title, tuple(re.findall(r"`(\w+)`", listed)), text.strip()))
    return found
