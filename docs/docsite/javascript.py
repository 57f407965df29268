"""JavaScript that the build runs in our own process, in V8 of the package mini-racer."""

from __future__ import annotations

import atexit
from functools import cache
from pathlib import Path

from py_mini_racer import MiniRacer


@cache
def engine(*scripts: Path) -> MiniRacer:
    """An engine that has read scripts, in this order."""
    engine = MiniRacer()
    # Left to the interpreter's end, closing it may hang.
    atexit.register(engine.close)
    for script in scripts:
        engine.eval(script.read_text(encoding="utf-8"))
    return engine
