"""Standard output and standard error, which may fail."""

from __future__ import annotations

import os
import sys


def settle_output() -> None:
    """Drop output that cannot be written, so that the interpreter does not complain at its exit."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
