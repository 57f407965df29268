"""Options that others wrote, checked as they are read."""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from memspan.checks import MOST
from memspan.errors import MemspanError


class Options:
    """Options by their peer's names. One that is missing or of another type raises
    :class:`MemspanError`, which names it.

    Args:
        values: as they stand in the file.
        where: the file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer."""
        value = self._get(name, default)
        if type(value) is not int:
            raise self._wrong(name, "an integer", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._get(name, default)
        if type(value) not in (int, float) or not abs(value) < MOST:
            raise self._wrong(name, "a number", value)
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._get(name, default)
        if type(value) not in (bool, int) or value not in (0, 1):
            raise self._wrong(name, "true or false", value)
        return bool(value)

    def items(self, name: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        """A list of values of one type."""
        value = self._get(name, default)
        if not isinstance(value, list | tuple) or any(type(item) is not kind for item in value):
            raise self._wrong(name, f"a list of {kind.__name__}", value)
        return list(value)

    def refuse_unless(self, name: str, value: int, why: str) -> None:
        """Refuse any other value of an option; ``why``: what memspan has instead."""
        found = self._get(name, value)
        if type(found) is not int or found != value:
            raise MemspanError(
                f"{self.where}: {name} is {_shown(found)}, but in memspan {why}: a checkpoint "
                f"with {name} {value} can be converted"
            )

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Name the file in errors raised inside."""
        try:
            yield
        except MemspanError as error:
            # Ours name it already.
            if str(error).startswith(self.where):
                raise
            raise MemspanError(f"{self.where}: {error}") from None

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise MemspanError(f"{self.where} has no {name}: use the checkpoint's own file")
        return value

    def _wrong(self, name: str, wanted: str, value: object) -> MemspanError:
        return MemspanError(
            f"{self.where}: {name} must be {wanted}, not {_shown(value)}: use the checkpoint's own file"
        )


def _shown(value: object) -> str:
    """A value, shortened. Python refuses to print an integer of thousands of digits."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return f"a huge {type(value).__name__}"
