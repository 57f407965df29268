"""Faults inside a process: hooks that run in a fork before `memspan` does."""

from __future__ import annotations

import builtins
import os
import signal
from collections.abc import Callable
from typing import Any

from memspan.training.checkpointer import Checkpointer
from memspan.training.updates import Updater


def at_operations(before: Callable[[str], None]) -> None:
    """Call `before` ahead of every write operation of this process on a file system."""

    def wrapped(name: str, original: Any) -> Any:
        def operation(*arguments: Any, **options: Any) -> Any:
            before(name)
            return original(*arguments, **options)

        return operation

    def opened(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if set(mode) & set("wax+"):
            before("open")
        return original_open(path, mode, *arguments, **options)

    original_open = builtins.open
    for name in ("replace", "link", "unlink", "mkdir", "rmdir", "fsync"):
        setattr(os, name, wrapped(name, getattr(os, name)))
    builtins.open = opened  # type: ignore[assignment]


def in_saves(which: Callable[[int], bool], fault: Callable[[str], None]) -> Callable[[], None]:
    """A hook: `fault` at every operation of the saves at the steps that `which` picks."""

    def hook() -> None:
        inside = False

        def before(name: str) -> None:
            if inside:
                fault(name)

        def save(self: Checkpointer) -> None:
            nonlocal inside
            inside = which(self._state.step)
            original(self)
            inside = False

        original = Checkpointer.save
        Checkpointer.save = save  # type: ignore[method-assign]
        at_operations(before)

    return hook


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after(count: int, fault: Callable[[str], None], lasting: bool = False) -> Callable[[str], None]:
    """`fault` at the operation after `count` others, or at that one and all later ones."""
    done = 0

    def before(name: str) -> None:
        nonlocal done
        if done == count or (lasting and done > count):
            fault(name)
        done += 1

    return before


def failing(number: int) -> Callable[[str], None]:
    def fault(name: str) -> None:
        raise OSError(number, os.strerror(number))

    return fault


def stop_at(step: int) -> Callable[[], None]:
    def hook() -> None:
        original = Updater.update

        def update(self: Updater) -> Any:
            if self.state.step == step:
                die()
            return original(self)

        Updater.update = update  # type: ignore[method-assign]

    return hook
