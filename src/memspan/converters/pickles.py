"""Pickles as data: how large they may be, and what stands in for other programs' objects.

A pickle's steps are counted before it is read, so that a small one cannot take long or much memory.
"""

from __future__ import annotations

import io
import pickletools
from collections import Counter
from typing import Any, Self

LIMIT = 1 << 25
"""Maximum size of a pickle in bytes; the vocabulary of WikiText-103 takes 10 million."""
MOST_STEPS = 1 << 21
"""Maximum number of steps of one kind, and of objects in the memo."""
MOST_OBJECTS = 1 << 19
"""Maximum number of steps that are not in :data:`SMALL`: each may take hundreds of bytes."""
MOST_TUPLES = 1 << 14
"""Maximum number of tuples: a key may nest them, and Python hashes these at any depth."""
MOST_LARGE = 1 << 12
"""Maximum number of integers of over 60 bits: they can be chosen such that all collide as keys."""
SMALL = frozenset((
    "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT",
    "NONE", "NEWTRUE", "NEWFALSE", "GET", "BINGET", "LONG_BINGET", "PUT", "BINPUT", "LONG_BINPUT",
    "MEMOIZE", "MARK", "APPEND", "APPENDS", "SETITEM", "SETITEMS",
))  # fmt: skip
"""Steps that make texts and numbers, put objects into the memo, or fill them."""


class Inert:
    """Stands in for an object of another program's class: its state without its code."""

    __slots__ = ("state",)
    state: dict[str, Any]

    # Not in __init__: a pickle can make an object without it.
    def __new__(cls, *_: object) -> Self:
        made = super().__new__(cls)
        made.state = {}
        return made

    def __setstate__(self, state: object) -> None:
        self.state = state if isinstance(state, dict) else {}


class Entries(dict[str, Any]):
    """Stands in for other kinds of dicts."""

    def __new__(cls, given: Any = ()) -> Any:
        """Keep a dict, or make one from a list of pairs, as Python 2 wrote an OrderedDict."""
        if isinstance(given, dict):
            return given
        made = super().__new__(cls)
        for key, value in given:
            if type(key) is not str:
                raise ValueError("a key is not text")
            dict.__setitem__(made, key, value)
        # A pickle can name a list again and again: each entry is copied once.
        if given:
            given.clear()
        return made

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        """Attributes, such as the versions in a state dict, are dropped."""


def end_of(content: bytes) -> int:
    """Where the pickle at the start of ``content`` ends.

    Raises:
        ValueError: it does not end, or could take long or much memory.
    """
    counts: Counter[str] = Counter()
    stream = io.BytesIO(content)
    for step, argument, _ in pickletools.genops(stream):
        kind, most = step.name, MOST_STEPS
        if kind == "LONG4" or ("PUT" in kind and (argument or 0) > MOST_STEPS):
            raise ValueError(f"a number in it is too large for {kind}")
        if kind.startswith("TUPLE"):
            kind, most = "TUPLE", MOST_TUPLES
        elif kind not in SMALL:
            kind, most = "OBJECT", MOST_OBJECTS
        elif isinstance(argument, int) and argument.bit_length() > 60:
            kind, most = "LARGE", MOST_LARGE
        counts[kind] += 1
        if counts[kind] > most:
            raise ValueError(f"it has more than {most:,} steps of the kind {kind}")
    return stream.tell()
