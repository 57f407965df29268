"""Notebooks as pages of the site: their notes, their code, and what they printed and drew.

Their first code cell installs what they need where it is missing. It names the repository's address,
which is put in where it is known.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from docsite.code import ROOT, read
from docsite.errors import DocsError

FOLDER = Path("examples/notebooks")
INSTALLS = "# Installs "
"""Begins the cell that installs."""
ADDRESS = 'REPOSITORY = ""'
"""Its line for the address."""


@dataclass(frozen=True)
class NotebookPage:
    """A notebook in Markdown."""

    text: str
    pictures: dict[str, bytes]
    """Its PNGs, by the names that the text has for them."""
    file: str
    """The notebook to download, with the repository's address."""


def read_notebook(path: Path, note: Callable[[str], str], repository: str = "") -> NotebookPage:
    """A notebook with its stored outputs.

    Args:
        path: the notebook.
        note: makes of a cell of Markdown what the site needs.
        repository: its public address, ``https://github.com/OWNER/NAME`` (empty: it has none).

    Raises:
        DocsError: it has an output that is neither text nor a PNG.
    """
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    about = path.stem
    file = addressed(read(path), repository)
    for cell in json.loads(file)["cells"]:
        source = "".join(cell["source"])
        if source.startswith(INSTALLS):
            # The page says how to install.
            continue
        if cell["cell_type"] == "markdown":
            parts.append(note(source))
            *_, about = about, *re.findall(r"^#+ (.+)$", source, flags=re.M)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
                continue
            if "image/png" not in output.get("data", {}):
                raise DocsError(f"{path.name}: an output is neither text nor a PNG")
            name = f"{path.stem}-{len(pictures) + 1}.png"
            pictures[name] = base64.b64decode(output["data"]["image/png"])
            parts.append(f"![A plot for: {about}]({name})")
    title, _, rest = "\n\n".join(parts).partition("\n")
    belongs = "*One of the [notebooks](index.md)*"
    text = f"{title}\n\n{belongs}\n\n{_opening(path.name, repository)}\n{rest}\n"
    return NotebookPage(text, pictures, file)


def addressed(notebook: str, repository: str) -> str:
    """A notebook's file whose first code cell installs from the repository (empty: none is known)."""
    line, filled = (json.dumps(each)[1:-1] for each in (ADDRESS, f'REPOSITORY = "{repository}"'))
    return notebook.replace(line, filled, 1)


def write_address(repository: str, root: Path = ROOT) -> None:
    """Put the repository's address into its notebooks, for those who open them from there.

    Raises:
        DocsError: no address is given.
    """
    if not repository:
        raise DocsError("give the repository's address: REPOSITORY=https://github.com/OWNER/NAME")
    for path in sorted((root / FOLDER).glob("*.ipynb")):
        path.write_text(addressed(read(path), repository), encoding="utf-8")


def needs_address(root: Path = ROOT) -> list[str]:
    """The notebooks of the repository that do not name its address."""
    line = json.dumps(ADDRESS)[1:-1]
    paths = sorted((root / FOLDER).glob("*.ipynb"))
    return [path.name for path in paths if line in path.read_text(encoding="utf-8")]


def _opening(name: str, repository: str) -> str:
    """Say how to run it: by one click where the repository has a public address."""
    if not repository:
        return (
            f"[Download the notebook]({name}){{ .md-button download }} to run it in a clone, after "
            "`pip install '.[notebooks]'`."
        )
    place = repository.removeprefix("https://github.com/").strip("/")
    hosted = f"https://colab.research.google.com/github/{place}/blob/main/{FOLDER}/{name}"
    return (
        f"[Open in Colab]({hosted}){{ .md-button }} "
        f"[Download the notebook]({name}){{ .md-button download }} Its first cell installs what is "
        "missing."
    )
