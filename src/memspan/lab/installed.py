"""Check that another library can be used, before it is imported."""

from __future__ import annotations

import re
from importlib import metadata

from memspan.errors import MemspanError

NEEDED = {"lm-eval": ">=0.4.13", "statelaws": ">=0.1", "transformers": ">=5.4,<6"}
"""The versions of each library that the tests have passed with, as in pyproject.toml."""
SOURCES = {"statelaws": "pip install ./packages/statelaws, in a checkout of memspan"}
"""Instructions to install packages that are on no index."""


def require(library: str) -> None:
    """Raise if a library of :data:`NEEDED` is missing or too old."""
    # Not as an extra of memspan, which is not on PyPI: anyone could take its name there.
    remedy = SOURCES.get(library, f"pip install '{library}{NEEDED[library]}'")
    try:
        version = metadata.version(library)
    except metadata.PackageNotFoundError:
        raise MemspanError(f"{library} is not installed: {remedy}") from None
    needed = NEEDED[library].removeprefix(">=").partition(",")[0]
    oldest, found = (list(map(int, re.findall(r"\d+", v))) for v in (needed, version))
    if found[: len(oldest)] < oldest:
        raise MemspanError(f"{library} {version} is too old, {needed} is needed: {remedy}")
