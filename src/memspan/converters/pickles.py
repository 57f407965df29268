"""A reader of pickles that hold plain data. It runs nothing: no class is imported, no function called.

It knows lists, tuples, dicts, text and numbers. ``Counter`` and ``OrderedDict`` are read as dicts.
The helpers that transformers' tokeniser pickles beside its vocabulary become :data:`IGNORED`, whatever
is said about them. Everything else is refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memspan.errors import MemspanError
from memspan.files.bytes import read_limited

LIMIT = 1 << 25
"""Bytes of a pickle at most; the vocabulary of WikiText-103 takes 10 million."""
IGNORED = object()
"""What stands for an object that nobody needs."""
DICTS = ("collections Counter", "collections OrderedDict")
HELPERS = (
    "re _compile",
    "sacremoses.normalize MosesPunctNormalizer",
    "sacremoses.tokenize MosesDetokenizer",
    "sacremoses.tokenize MosesTokenizer",
    "tokenizers AddedToken",
    "transformers.tokenization_utils Trie",
    "transformers.tokenization_utils_base AddedToken",
)
"""What a ``TransfoXLTokenizer`` holds beside lists, dicts, text and numbers."""
KEYS = (str, int, float, type(None))


class _Class:
    """A class or function that a pickle names, as its name."""

    def __init__(self, name: str) -> None:
        self.name = name


def read_plain(path: Path) -> object:
    """The value in a pickle.

    Raises:
        MemspanError: the file cannot be read, is damaged or too long, or holds more than plain data.
    """
    try:
        content = read_limited(path, LIMIT)
        return _Machine(path).run(content)
    except MemspanError:
        raise
    except OSError as error:
        raise MemspanError(f"cannot read {path} ({error.strerror}): check the file") from None
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        reason = str(error)[:100] or type(error).__name__
        raise MemspanError(f"{path} is damaged or no pickle ({reason}): get it again") from None


class _Machine:
    """The stack machine that a pickle is a program for, less every instruction that could run code."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        # Entries that may still be copied: in plain data each takes bytes of its own.
        self._left = 0
        push = self._stack.append
        self._steps: dict[str, Callable[[Any], object]] = {
            **dict.fromkeys(("PROTO", "FRAME"), lambda _: None),
            **dict.fromkeys(VALUES, push),
            "NONE": lambda _: push(None),
            "NEWTRUE": lambda _: push(True),
            "NEWFALSE": lambda _: push(False),
            **dict.fromkeys(("EMPTY_LIST", "EMPTY_SET"), lambda _: push([])),
            "EMPTY_DICT": lambda _: push({}),
            "EMPTY_TUPLE": lambda _: push(()),
            "MARK": lambda _: self._marks.append(len(self._stack)),
            "POP": lambda _: self._stack.pop(),
            "POP_MARK": lambda _: self._since_mark(),
            "DUP": lambda _: push(self._stack[-1]),
            "TUPLE": lambda _: push(tuple(self._since_mark())),
            "TUPLE1": lambda _: push(tuple(self._last(1))),
            "TUPLE2": lambda _: push(tuple(self._last(2))),
            "TUPLE3": lambda _: push(tuple(self._last(3))),
            **dict.fromkeys(("LIST", "FROZENSET"), lambda _: push(self._since_mark())),
            "DICT": lambda _: push(self._entries({}, self._since_mark())),
            "APPEND": lambda _: self._extend(self._last(1)),
            **dict.fromkeys(("APPENDS", "ADDITEMS"), lambda _: self._extend(self._since_mark())),
            "SETITEM": lambda _: self._set(self._last(2)),
            "SETITEMS": lambda _: self._set(self._since_mark()),
            **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda n: push(self._memo[n])),
            **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), self._remember),
            "MEMOIZE": lambda _: self._remember(len(self._memo)),
            "GLOBAL": lambda name: push(self._named(name)),
            "STACK_GLOBAL": lambda _: push(self._named(" ".join(self._last(2)))),
            "NEWOBJ": lambda _: self._call(),
            "REDUCE": lambda _: self._call(),
            "BUILD": lambda _: self._build(),
        }

    def run(self, content: bytes) -> object:
        """The value that the program leaves on the stack."""
        self._left = len(content)
        for instruction, argument, _ in pickletools.genops(content):
            if instruction.name == "STOP":
                return self._stack.pop()
            step = self._steps.get(instruction.name)
            if step is None:
                raise self._refused(f"the instruction {instruction.name}")
            step(argument)
        raise ValueError("it has no end")

    def _last(self, n: int) -> list[Any]:
        taken = self._stack[len(self._stack) - n :]
        if len(taken) != n:
            raise ValueError("its stack is empty")
        del self._stack[-n:]
        return taken

    def _since_mark(self) -> list[Any]:
        mark = self._marks.pop()
        taken = self._stack[mark:]
        del self._stack[mark:]
        return taken

    def _remember(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def _extend(self, values: list[Any]) -> None:
        if not isinstance(self._stack[-1], list):
            raise ValueError("it appends to what is no list")
        self._stack[-1].extend(values)

    def _set(self, flat: list[Any]) -> None:
        self._entries(self._stack[-1], flat)

    def _entries(self, target: Any, flat: list[Any]) -> Any:
        """``target`` with keys and values, which alternate in ``flat``."""
        keys = flat[::2]
        if not isinstance(target, dict) or not all(isinstance(key, KEYS) for key in keys):
            raise ValueError("it has a dict with keys that are neither text nor numbers")
        target.update(zip(keys, flat[1::2], strict=True))
        return target

    def _named(self, name: str) -> _Class:
        if name not in (*DICTS, *HELPERS):
            raise self._refused(".".join(name.split()))
        return _Class(name)

    def _call(self) -> None:
        """What making an object comes to, without making it."""
        kind, arguments = self._last(2)
        if not isinstance(kind, _Class) or not isinstance(arguments, tuple):
            raise ValueError("it calls what is no class")
        if kind.name in HELPERS:
            self._stack.append(IGNORED)
            return
        entries = arguments[0] if arguments else {}
        if not isinstance(entries, dict):
            # As Python 2 wrote an OrderedDict. The same list may be named again and again.
            self._left -= len(entries)
            if self._left < 0:
                raise ValueError("it repeats a list more often than it is long")
            entries = self._entries({}, [x for key, value in entries for x in (key, value)])
        self._stack.append(entries)

    def _build(self) -> None:
        self._last(1)
        if self._stack[-1] is not IGNORED:
            raise self._refused("an object with a state of its own")

    def _refused(self, what: str) -> MemspanError:
        return MemspanError(
            f"{self._path} holds {what[:100]}, which is neither list, dict, text nor number and could "
            "run a program, so the file is not read: put a vocabulary of plain data there"
        )


VALUES = (
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
)
"""Instructions whose argument is the value; Python 2's byte strings are text."""
