"""Calls from Python: arguments of wrong names and types are refused in one line, as by the commands.

:func:`checked` does so for a function, whose type hints and docstring say what it takes;
:class:`Options` for the names of a dataclass's fields, whose types :func:`memspan.checks.check_types`
checks. No torch here.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import functools
import inspect
import itertools
import numbers
import os
import re
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

from memspan.errors import MemspanError

P = ParamSpec("P")
R = TypeVar("R")

SYNONYMS: dict[str, tuple[str, ...]] = {
    "batch": ("batch_size",),
    "checkpoint": ("run",),
    "data": ("corpus",),
    "data_dir": ("corpus",),
    "dataset": ("corpus",),
    "file": ("corpus",),
    "hidden_size": ("d_model",),
    "lr": ("learning_rate",),
    "max_iters": ("steps",),
    "max_length": ("tokens",),
    "max_new_tokens": ("tokens",),
    "max_steps": ("steps",),
    "max_tokens": ("tokens",),
    "model": ("run",),
    "n": ("samples",),
    "n_embd": ("d_model",),
    "n_head": ("n_heads",),
    "n_layer": ("n_layers",),
    "num_heads": ("n_heads",),
    "num_layers": ("n_layers",),
    "num_return_sequences": ("samples",),
    "num_samples": ("samples",),
    "num_steps": ("steps",),
    "num_tokens": ("tokens",),
    "optimizer": ("optimiser",),
    "out": ("folder",),
    "output_dir": ("folder",),
    "stop_strings": ("stop",),
    "text": ("prompt", "corpus"),
    "texts": ("prompt", "corpus"),
    "warmup": ("warmup_steps",),
    "wd": ("weight_decay",),
}
"""Names that other libraries have for options of ours: those of the functions that take it."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name among ``known`` that is meant by ``name``: what other libraries call so, or the one
    that is spelled alike (None: there is none)."""
    known = list(known)
    alike = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return next(iter([*_synonyms(name, known), *alike]), None)


def _synonyms(name: str, known: Iterable[str]) -> list[str]:
    return [ours for ours in SYNONYMS.get(name, ()) if ours in known]


def perhaps(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown ``name``: a guess, or all that there is."""
    known = list(known)
    near = nearest(name, known)
    return f"perhaps {near} is meant" if near else f"use {', '.join(known)}"


def nearest_path(path: str | Path) -> Path | None:
    """The file or folder beside ``path``, which does not exist, that is spelled like it (None: there is
    none)."""
    path = Path(path)
    try:
        # The first thousand: this is only for a message.
        names = [each.name for each in itertools.islice(os.scandir(path.parent), 1000)]
    except (OSError, ValueError):
        return None
    found = difflib.get_close_matches(path.name, names, n=1, cutoff=0.7)
    return path.with_name(found[0]) if found else None


class Options:
    """Base of dataclasses of options: one that does not exist is a :class:`MemspanError`."""

    def __new__(cls, *arguments: object, **options: object) -> Self:
        known = [each.name for each in dataclasses.fields(cls) if each.init]  # type: ignore[arg-type]
        for name in options:
            if name not in known:
                raise MemspanError(f"{cls.__name__} has no {name}: {perhaps(name, known)}")
        return super().__new__(cls)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """A public function that raises :class:`MemspanError` where it cannot be called so.

    The line has what the function's docstring says of the argument.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        _refuse_names(function, signature, arguments, options)
        given = signature.bind_partial(*arguments, **options).arguments
        _refuse_types(function, given)
        _refuse_missing(function, signature, given)
        return function(*arguments, **options)

    return call


def names_checked(function: Callable[P, R]) -> Callable[P, R]:
    """The same for arguments that are missing or of other names alone, at no cost where none is: for
    methods that check values themselves, and may be called for every token."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            return function(*arguments, **options)
        except TypeError as error:
            # Raised by the call, not within the function.
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                _refuse_names(function, signature, arguments, options)
                given = signature.bind_partial(*arguments, **options).arguments
                _refuse_missing(function, signature, given)
            raise

    return call


def _verb(function: Callable[..., Any]) -> str:
    # A class is called by its own name.
    return function.__qualname__.removesuffix(".__init__").rpartition(".")[2]


def _refuse_names(
    function: Callable[..., Any],
    signature: inspect.Signature,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    verb = _verb(function)
    own = signature.parameters
    for name in options:
        if name not in own and (remedy := _instead(name, function, own)):
            raise MemspanError(f"{verb} has no {name}: {remedy}")
    by_place = [each.name for each in own.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    if len(arguments) > len(by_place):
        names = ", ".join(name for name in by_place if name != "self")
        raise MemspanError(f"{verb} takes only {names} without a name: name the others")
    for name in by_place[: len(arguments)]:
        if name in options:
            raise MemspanError(f"{verb} was given {name} twice: drop one")


def _refuse_types(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    for name, (accepts, expected) in _expected(function).items():
        if name in given and not accepts(given[name]):
            described = _described(function, name)
            about = f" ({described})" if described else ""
            if name == "run" and type(given[name]).__name__ == "LanguageModel":
                about = ": memspan.save_run(model, FOLDER) makes a run of it"
            raise MemspanError(
                f"{_verb(function)} takes {expected} as {name}, not {shown(given[name])}{about}"
            )


def _refuse_missing(
    function: Callable[..., Any], signature: inspect.Signature, given: Mapping[str, Any]
) -> None:
    for each in signature.parameters.values():
        optional = each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        if each.default is each.empty and not optional and each.name not in given:
            described = _described(function, each.name) or "give it"
            raise MemspanError(f"{_verb(function)} needs {each.name}: {described}")


def _instead(
    name: str, function: Callable[..., Any], own: Mapping[str, inspect.Parameter]
) -> str | None:
    """Spell an option that the function does not have by this name (None: the function takes
    options of any name, and decides itself)."""
    names = [each for each in own if each != "self"]
    if synonyms := _synonyms(name, names):
        return f"perhaps {synonyms[0]} is meant"
    for parameter, hint in _hints(function).items():
        for kind in (hint, *typing.get_args(hint)):
            if written := _written(name, typing.get_origin(kind) or kind):
                return f"write {parameter}={written}"
    if any(each.kind is each.VAR_KEYWORD for each in own.values()):
        return None
    return perhaps(name, names)


def _written(name: str, kind: Any) -> str | None:
    """The options of class ``kind`` with ``name`` among them (None: it has no such option)."""
    if not (isinstance(kind, type) and issubclass(kind, Options)):
        return None
    fields = [each.name for each in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for known in [name, *SYNONYMS.get(name, ())]:
        if known in fields:
            return f"memspan.{kind.__name__}({known}=...)"
    for each, hint in typing.get_type_hints(kind).items():
        if inner := _written(name, hint):
            return f"memspan.{kind.__name__}(..., {each}={inner})"
    return None


# ----- Hints and docstrings


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    # A result's type may be another library's, which is not imported before the call.
    inner = inspect.unwrap(function)
    annotations = {n: hint for n, hint in inner.__annotations__.items() if n != "return"}
    named = types.SimpleNamespace(__annotations__=annotations)
    return typing.get_type_hints(named, inner.__globals__)


@functools.cache
def _described(function: Callable[..., Any], name: str) -> str:
    """The beginning of what a docstring says of an argument."""
    plain = re.sub(r":\w+:`([^`]+)`", r"\1", function.__doc__ or "").replace("``", "")
    found = re.search(rf"^ +{name}: ([^;:(]+?)(?=[;:(]|\.\s)", plain, re.MULTILINE)
    return " ".join(found[1].split()) if found else ""


Check = tuple[Callable[[Any], bool], str]
"""Decides whether a value is taken, and says which are."""


@functools.cache
def _expected(function: Callable[..., Any]) -> dict[str, Check]:
    variadic = [
        each.name
        for each in inspect.signature(function).parameters.values()
        if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    ]
    return {name: _check(hint) for name, hint in _hints(function).items() if name not in variadic}


def _check(hint: Any) -> Check:
    if hint in SCALARS:
        return SCALARS[hint]
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        checks = [_check(argument) for argument in arguments]
        kinds = list(dict.fromkeys(words for _, words in checks))
        if "a path" in kinds and "text" in kinds:
            kinds.remove("text")
        return lambda value: any(accepts(value) for accepts, _ in checks), listed(kinds)
    if origin is typing.Literal:
        return lambda value: value in arguments, listed([repr(each) for each in arguments])
    if origin in (collections.abc.Iterable, collections.abc.Sequence):
        accepts, words = _check(arguments[0])
        return lambda value: _holds(value, origin, accepts), f"a list of {_plural(words)}"
    kind = origin or hint
    if kind is collections.abc.Callable or getattr(kind, "_is_protocol", False):
        return callable, "a function"
    if not isinstance(kind, type) or kind is object:
        return lambda value: True, "anything"
    return lambda value: isinstance(value, kind), article(kind.__name__)


def _holds(value: Any, kind: Any, accepts: Callable[[Any], bool]) -> bool:
    """Texts are not taken apart, and iterators are not emptied."""
    if isinstance(value, str | bytes) or not isinstance(value, kind):
        return False
    return not isinstance(value, list | tuple) or all(map(accepts, value))


SCALARS: dict[Any, Check] = {
    # To Python a bool is also an int.
    int: (lambda x: isinstance(x, numbers.Integral) and not isinstance(x, bool), "an integer"),
    float: (lambda x: isinstance(x, numbers.Real) and not isinstance(x, bool), "a number"),
    bool: (lambda x: isinstance(x, bool), "True or False"),
    str: (lambda x: isinstance(x, str), "text"),
    bytes: (lambda x: isinstance(x, bytes), "bytes"),
    Path: (lambda x: isinstance(x, os.PathLike), "a path"),
    types.NoneType: (lambda x: x is None, "None"),
}


PLAIN = (str, bytes, int, float, list, tuple, dict, set, types.NoneType)


def listed(words: list[str]) -> str:
    """Words as in a sentence, ``a, b or c``."""
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def _plural(words: str) -> str:
    noun = words.removeprefix("an ").removeprefix("a ")
    return noun if noun.endswith("s") else f"{noun}s"


def article(noun: str) -> str:
    """A noun with ``a`` or ``an``."""
    return f"{'an' if noun[0] in 'AEIOUaeiou' else 'a'} {noun}"


def shown(value: object) -> str:
    """A value as a message names it: its digits or letters, or its type if it is an object."""
    return reprlib.repr(value) if isinstance(value, PLAIN) else article(type(value).__name__)
