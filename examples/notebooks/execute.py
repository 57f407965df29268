"""Runs notebooks and stores what they print and draw, without times and paths of this machine.

    python examples/notebooks/execute.py            # all, or NAME.ipynb ...

Needs the extra ``notebooks``. Ruff formats the cells: ``ruff format examples``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
MOST_SECONDS = 600
"""Seconds that a cell may take, on a machine that has other work."""


def executed(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs, run in ``folder``.

    Raises:
        CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        timeout=MOST_SECONDS,
        # The same however fast it printed, and whenever.
        coalesce_streams=True,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    # The kernel adds its version.
    notebook.metadata.language_info = {"name": "python"}
    return notebook


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:] or sorted(HERE.glob("*.ipynb"))):
        nbformat.write(executed(path, path.parent), path)
        print(path, f"{path.stat().st_size / 1000:.0f} kB")
