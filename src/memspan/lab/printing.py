"""Lines on a terminal, broken between words; files and pipes get them whole."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TextIO

LEAST = 20
"""Columns of a terminal that is taken for narrower than it is."""


def say(text: object, stream: TextIO | None = None) -> None:
    """Print text, on a terminal without a line that ends within a word.

    Args:
        text: one line or several.
        stream: where to (None: standard output).
    """
    out = sys.stdout if stream is None else stream
    if out is not None and out.isatty():
        text = wrapped(str(text), shutil.get_terminal_size().columns)
    print(text, file=out, flush=True)


def wrapped(text: str, columns: int) -> str:
    """Break lines of more than ``columns`` characters between words.

    The rest of a line that is indented is indented by two more.
    """

    def broken(line: str) -> str:
        if len(line) <= columns:
            return line
        indent = line[: len(line) - len(line.lstrip())]
        return textwrap.fill(
            line,
            max(columns, LEAST),
            subsequent_indent=indent and f"{indent}  ",
            break_long_words=False,
            break_on_hyphens=False,
        )

    return "\n".join(map(broken, text.split("\n")))


def quoted(text: str) -> str:
    """A model's text, a bar before each line, without characters that a terminal acts on."""
    lines = text.strip("\n").split("\n")
    plain = ("".join(c if c.isprintable() else "\ufffd" for c in line) for line in lines)
    return "\n".join(f"  | {line}" for line in plain)
