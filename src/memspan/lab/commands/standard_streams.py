"""Reads a corpus from standard input; copes with standard output and error that cannot be written."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memspan.errors import MemspanError

STDIN = "-"
"""The corpus that comes from standard input."""


def keep_input(path: Path, option: str) -> None:
    """Write standard input to a new file; ``option``: the flag that asked for it, for messages."""
    # Not above: the command line imports this module first.
    from memspan.files.disk import write_atomically
    from memspan.lab.data.texts import CHUNK

    if sys.stdin is None:
        raise MemspanError(f"standard input is closed: give {option} a file")
    read = sys.stdin.buffer.read
    write_atomically(path, iter(lambda: read(CHUNK), b""))
    if not path.stat().st_size:
        path.unlink()
        raise MemspanError(f"standard input is empty: pipe a text into {option} {STDIN}")


@contextlib.contextmanager
def readable(corpus: str | None, split: str) -> Iterator[dict[str, Any]]:
    """Yield the text to read, as the arguments ``corpus`` and ``split`` of a function.

    A missing text is an error, before torch is imported. Standard input is kept in a file inside the
    block, and read whole unless a split is named.
    """
    import tempfile

    from memspan.lab.data.corpora import load_corpus, missing

    if corpus == STDIN:
        with tempfile.TemporaryDirectory(prefix="memspan-") as folder:
            path = Path(folder, "standard input")
            keep_input(path, "--corpus")
            yield {"corpus": str(path), "split": "all" if split == "auto" else split}
        return
    if corpus is not None and missing(corpus):
        load_corpus(corpus)
    yield {"corpus": corpus, "split": "validation" if split == "auto" else split}


def settle_output() -> None:
    """Drop output that cannot be written, so that the interpreter does not complain on exit."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
