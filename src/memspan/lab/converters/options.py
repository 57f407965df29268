"""Options written by other programs, checked as they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        self.values = values
        self.where = where

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer."""
        found: int = self._get(name, default, "an integer", lambda v: type(v) is int)
        return found

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""

        def is_number(value: Any) -> bool:
            return type(value) in (int, float) and abs(value) < MOST

        return float(self._get(name, default, "a number", is_number))

    def flag(self, name: str, default: bool | None = None) -> bool:
        """True or false."""

        def is_flag(value: Any) -> bool:
            return type(value) in (bool, int) and value in (0, 1)

        return bool(self._get(name, default, "true or false", is_flag))

    def items(self, name: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        """A list of values of one type."""

        def is_list(value: Any) -> bool:
            return isinstance(value, list | tuple) and all(type(item) is kind for item in value)

        return list(self._get(name, default, f"a list of {kind.__name__}", is_list))

    def refuse_unless(self, name: str, value: int, why: str) -> None:
        """Raise for any other value of an option; ``why``: memspan's alternative."""
        found = self.integer(name, value)
        if found != value:
            raise MemspanError(
                f"{self.where}: {name} is {found!r:.60}, but in memspan {why}: a checkpoint "
                f"with {name} {value} can be converted"
            )

    def _get(self, name: str, default: Any, wanted: str, is_right: Callable[[Any], bool]) -> Any:
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise MemspanError(f"{self.where} has no {name}: use the checkpoint's own file")
        if not is_right(value):
            raise MemspanError(
                f"{self.where}: {name} must be {wanted}, not {value!r:.60}: use the checkpoint's own "
                "file"
            )
        return value
