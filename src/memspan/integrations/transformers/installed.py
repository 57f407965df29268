"""Whether transformers can be used here. It is imported after this was asked."""

from __future__ import annotations

from importlib import metadata

from memspan.errors import MemspanError

OLDEST = (5, 4)
"""The oldest version that the tests have passed with, see pyproject.toml."""


def require_transformers() -> None:
    """Refuse to go on where transformers is missing or too old.

    Raises:
        MemspanError: says what to install.
    """
    remedy = "pip install 'memspan[transformers]'"
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        raise MemspanError(f"transformers is not installed: {remedy}") from None
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise MemspanError(f"transformers {version} is too old, {needed} is needed: {remedy}")
