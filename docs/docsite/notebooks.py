"""Notebooks as pages of the site: their notes, their code, and what they printed and drew."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from docsite.code import read
from docsite.errors import DocsError


@dataclass(frozen=True)
class NotebookPage:
    """A notebook in Markdown."""

    text: str
    pictures: dict[str, bytes]
    """Its PNGs, by the names that the text has for them."""


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
    for cell in json.loads(read(path))["cells"]:
        source = "".join(cell["source"])
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
    return NotebookPage(
        f"{title}\n\n{belongs}\n\n{_opening(path.name, repository)}\n{rest}\n", pictures
    )


def _opening(name: str, repository: str) -> str:
    """Say how to run it: by one click where the repository has a public address."""
    download = (
        f"[Download the notebook]({name}){{ .md-button download }} to run it: in a clone, after "
        "`pip install '.[notebooks]'`; or upload it to a hosted one, with the wheel that "
        "`make package` makes, and begin with `%pip install memspan-*.whl matplotlib`."
    )
    if not repository:
        return download
    place = repository.removeprefix("https://github.com/").strip("/")
    hosted = f"https://colab.research.google.com/github/{place}/blob/main/examples/notebooks/{name}"
    return (
        f"[Open it in Colab]({hosted}){{ .md-button }} and begin with "
        f"`%pip install git+https://github.com/{place} matplotlib`.\n\n{download}"
    )
