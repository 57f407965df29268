"""The error that an author of a page sees."""

from __future__ import annotations


class DocsError(Exception):
    """A page, or what it names, is wrong; the message is one line that says what to change."""
