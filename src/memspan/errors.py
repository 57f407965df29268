"""The errors that users see: a line that says what is wrong and what to do about it."""

from __future__ import annotations

from typing import get_args


class MemspanError(ValueError):
    """A mistake outside memspan's code: a bad file, option or environment.

    The command line prints the message as one line and exits with status 2; in Python it is a
    ``ValueError``. The message says what is wrong *and* what to do.
    """

    def __init__(self, message: str) -> None:
        # It may quote a damaged file or a server: without their line breaks and escapes.
        printable = "".join(c if c.isprintable() else " " for c in message)
        super().__init__(" ".join(printable.split()))


def counted(n: int, noun: str) -> str:
    """A number with its noun, such as ``1 token`` and ``2,000 tokens``."""
    return f"{n:,} {noun}{'s' * (n != 1)}"


def refuse_unknown(what: str, name: str | None, known: object) -> None:
    """Raise :class:`MemspanError` unless ``name`` is None or one of the literal type ``known``."""
    if name is not None and name not in get_args(known):
        raise MemspanError(f"there is no {what} {name!r}: use {', '.join(get_args(known))}")


class UnreadableError(MemspanError):
    """A file could not be read now; that says nothing about its content."""


class StaleReaderError(MemspanError):
    """A reader's model has changed since it was made."""

    def __init__(self) -> None:
        super().__init__(
            "the weights or modules have changed since this reader was made, so what it cached is "
            "stale: make a new one with model.reader(reader.memory)"
        )


class NonFiniteError(MemspanError):
    """Numbers are infinite or NaN."""
