"""The errors that users see: a line that says what is wrong and what to do about it."""

from __future__ import annotations


class StatelawsError(ValueError):
    """A mistake outside statelaws' code: a model, a file or an option that cannot be used.

    The command line prints the message as one line and exits with status 2.
    """

    def __init__(self, message: str) -> None:
        # It may quote another library: without line breaks and escapes.
        printable = "".join(c if c.isprintable() else " " for c in message)
        super().__init__(" ".join(printable.split()))


class RefusedError(StatelawsError):
    """A model cannot do what was asked; the message is the model's own."""


class NotOfferedError(StatelawsError):
    """A model's interface does not offer what was asked."""
