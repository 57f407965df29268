"""Whether another library can be used here. It is imported after this was asked."""

from __future__ import annotations

import re
from importlib import metadata

from memspan.errors import MemspanError

OLDEST = {"lm-eval": (0, 4, 13), "transformers": (5, 4)}
"""Of each library, which is an extra of the same name, the oldest version that the tests have passed
with; pyproject.toml has the same numbers."""


def require(library: str) -> None:
    """Refuse to go on where a library of :data:`OLDEST` is missing or too old.

    Raises:
        MemspanError: says what to install.
    """
    remedy = f"pip install 'memspan[{library}]'"
    try:
        version = metadata.version(library)
    except metadata.PackageNotFoundError:
        raise MemspanError(f"{library} is not installed: {remedy}") from None
    oldest = OLDEST[library]
    if tuple(map(int, re.findall(r"\d+", version)[: len(oldest)])) < oldest:
        needed = ".".join(map(str, oldest))
        raise MemspanError(f"{library} {version} is too old, {needed} is needed: {remedy}")
