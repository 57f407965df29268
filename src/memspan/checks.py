"""Checks of options: types, against the hints of the dataclass that declares them, and ranges; the
names of precisions. No torch here."""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args, get_origin

from memspan.errors import MemspanError

MOST = (1 << 63) - 1
"""The largest integer."""


def check_types(options: object) -> None:
    """Refuse a dataclass whose fields are not what their type hints say.

    It knows bool, int, float, str, ``Literal``, ``X | None``, ``tuple[X, ...]`` and dataclasses. A
    float may be given as an int, and must be finite; a bool is neither.
    """
    kind: Any = type(options)
    for name, (accepts, expected) in _checks(kind).items():
        value = getattr(options, name)
        if type(value) is int and abs(value) > MOST:
            # Without its digits: Python refuses to print thousands of them.
            raise MemspanError(
                f"{name} must be at most 2^63 - 1 in size, PyTorch's largest integer"
            )
        if not accepts(value):
            raise MemspanError(f"{name} must be {expected}, not {reprlib.repr(value)}")


Check = tuple[Callable[[Any], bool], str]
"""A test of a value, and a description of valid values."""


@functools.cache
def _checks(kind: type[Any]) -> dict[str, Check]:
    hints = typing.get_type_hints(kind)
    # A type variable stands for a dataclass, which checks itself.
    return {
        field.name: _check(hints[field.name])
        for field in dataclasses.fields(kind)
        if not isinstance(hints[field.name], typing.TypeVar)
    }


def _check(hint: Any) -> Check:
    if hint in SCALARS:
        return SCALARS[hint]
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin is typing.Literal:
        return lambda value: isinstance(value, str) and value in arguments, _listed(arguments)
    if origin is tuple:
        accepts, expected = _check(arguments[0])
        return (
            lambda value: isinstance(value, tuple) and all(map(accepts, value)),
            f"a tuple of which each item is {expected}",
        )
    if origin in (types.UnionType, typing.Union):
        checks = [_check(argument) for argument in arguments]
        return (
            lambda value: any(accepts(value) for accepts, _ in checks),
            _listed([expected for _, expected in checks]),
        )
    return lambda value: isinstance(value, hint), f"a {hint.__name__}"


def _is_number(value: Any) -> bool:
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))


SCALARS: dict[Any, Check] = {
    bool: (lambda value: isinstance(value, bool), "True or False"),
    # To Python a bool is also an int.
    int: (lambda value: type(value) is int, "an integer"),
    float: (_is_number, "a finite number"),
    str: (lambda value: isinstance(value, str), "text"),
    types.NoneType: (lambda value: value is None, "None"),
}


def _listed(words: Sequence[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def at_least(low: float, config: object, *names: str) -> None:
    """Refuse a number below ``low`` in any of the options ``names``; None is accepted."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < low:
            raise MemspanError(f"{name} must be at least {low}, not {value}")


def probability(config: object, *names: str) -> None:
    """Refuse values that are not in [0, 1) in any of the options ``names``."""
    for name in names:
        value = getattr(config, name)
        if not 0 <= value < 1:
            raise MemspanError(f"{name} is a probability in [0, 1), not {value}")


Products = Literal["auto", "float32", "bfloat16"]
MatmulPrecision = Literal["auto", "highest", "high", "medium"]


def refuse_contradictory_precision(precision: str, matmul_precision: str) -> None:
    """Refuse to round what stays in float32 under bfloat16, such as recurrences over a memory."""
    if precision == "bfloat16" and matmul_precision in ("high", "medium"):
        raise MemspanError(
            f"with precision bfloat16, matmul_precision {matmul_precision} would round parts that "
            "must stay float32: use precision float32, or matmul_precision highest"
        )
