"""Command lines as dataclasses: the string under a field is the flag's help. Parsed by tyro."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro
from tyro import _errors as events

from memspan.errors import MemspanError
from memspan.models.registry import load_plugins

T = TypeVar("T")
Modules = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        name="import",
        metavar="MODULE",
        help="Import this module first: it registers an architecture of your own. May be repeated.",
    ),
    tyro.conf.UseAppendAction,
]
"""The option ``--import``, for the verbs that build models. :func:`import_modules` acts on it."""


def parsed(kind: type[T], arguments: list[str], program: str, default: T | None = None) -> T:
    """The command line as a ``kind``; exits after ``--help``.

    Args:
        kind: a dataclass.
        arguments: without the verb.
        program: the verb, for messages.
        default: values of the options that are not given (None: those of ``kind``).

    Raises:
        MemspanError: an unknown option, or a value of the wrong type or out of range.
    """
    options: dict[str, Any] = {} if default is None else {"default": default}
    with _refusals(kind, program, options):
        return tyro.cli(kind, args=arguments, prog=program, **options)


class _RefusedError(Exception):
    """The parser's event. Not a ValueError, which tyro would take for a mistake in a value."""

    def __init__(self, event: events.ParseErrorEvent) -> None:
        self.event = event


@contextlib.contextmanager
def _refusals(kind: Any, program: str, options: dict[str, Any]) -> Iterator[None]:
    """Raise the parser's errors as :class:`MemspanError` instead of drawing them in a box.

    The events are not part of tyro's public interface: pyproject.toml bounds its version, and
    test_parsing.py fails if they change. An event unknown here is drawn by tyro, which then exits.
    """

    def refuse(event: events.ParseErrorEvent) -> None:
        raise _RefusedError(event)

    try:
        with events.on_parse_error(refuse):
            yield
    except _RefusedError as error:
        event = error.event
        if isinstance(event, events.UnrecognizedArgs):
            line = _unknown(event.tokens, list(_flags(options.get("default", kind))))
        else:
            line = _line(event)
        raise MemspanError(f"{line}; {program} --help explains every option") from None


def _line(event: events.ParseErrorEvent) -> str:
    if isinstance(event, events.InvalidChoice):
        choices = ", ".join(event.choices)
        return f"{event.argument.display_name()} must be one of {choices}, not {event.value!r}"
    if isinstance(event, events.BadValue):
        return f"{event.argument.display_name()} needs a value: give one"
    if isinstance(event, events.MissingArgs):
        return (
            f"{', '.join(a.arg.display_name() for a in event.missing_arguments)} is missing: add it"
        )
    if isinstance(event, events.InstantiationFailure):
        # Without an argument it is a message of ours, from a dataclass's own checks.
        if event.argument is None:
            return event.message
        name = event.argument.display_name()
        # Python's messages; for an option that may be None, they are among what was tried.
        for start, kind in (("invalid literal", "an integer"), ("could not convert", "a number")):
            if start in event.message:
                value = event.message.partition(start)[2].partition(": ")[2]
                return f"{name} takes {kind}, not {value}"
        return f"{name}: {event.message}"
    return f"these options cannot be parsed ({type(event).__name__})"


def _unknown(tokens: list[str], flags: list[str]) -> str:
    name = next((token for token in tokens if token.startswith("-")), None)
    if name is None:
        return f"unexpected argument {tokens[0]!r}: drop it, or name its option"
    name = name.partition("=")[0].replace("_", "-")
    # Without its section an option is rarely the nearest in spelling.
    near = [flag for flag in flags if flag.endswith(f".{name.lstrip('-')}")]
    near = near or difflib.get_close_matches(name, flags, n=1, cutoff=0.8)
    return f"there is no option {name}" + "".join(f"; perhaps {flag} is meant" for flag in near)


def _flags(options: Any, prefix: str = "") -> Iterator[str]:
    """The flags of a dataclass or, where its sections have no defaults, of an instance."""
    kind = options if isinstance(options, type) else type(options)
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        renamed = [getattr(m, "name", None) for m in getattr(hints[field.name], "__metadata__", ())]
        name = next((n for n in renamed if n is not None), field.name)
        part = getattr(options, field.name, None)
        if dataclasses.is_dataclass(part):
            yield from _flags(part, f"{prefix}{name}." if name else prefix)
        else:
            yield f"--{prefix}{name}".replace("_", "-")


def peek_flags(arguments: list[str]) -> argparse.Namespace:
    """The options that decide which others there are, and their defaults.

    Mistakes in them are left to :func:`parsed`.

    Returns:
        ``model``, ``preset`` and ``resume``, each None if it is not given; ``modules``, a list.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--model", "--preset", "--resume"):
        parser.add_argument(name, nargs="?")
    parser.add_argument("--import", dest="modules", nargs="?", action="append", default=[])
    return parser.parse_known_args(arguments)[0]


def import_modules(arguments: list[str]) -> None:
    """Import the modules of ``--import``, which register architectures of their own.

    Raises:
        MemspanError: there is no such module.
    """
    load_plugins()
    for name in filter(None, peek_flags(arguments).modules):
        # Last: a file in the current folder must not stand in for an installed library.
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise MemspanError(
                f"--import {name}: there is no module {error.name}: check the name, or install it"
            ) from None
