"""Each call of the file system in a run fails once: the run goes on as if nothing had been, or ends in
one line and is taken up again, and nothing that was good is lost."""

from __future__ import annotations

import builtins
import errno
import io
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import memspan
from memspan.errors import MemspanError
from memspan.files import tensors
from memspan.lab.runs import checkpoints
from memspan.lab.training import start, trainer
from tiny_runs import content, options, step_of

pytestmark = [pytest.mark.hardening, pytest.mark.usefixtures("tiny_text")]

ERRORS = [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EINTR, errno.ENOSPC]
ON_PATHS = (
    "open",
    "stat",
    "lstat",
    "replace",
    "link",
    "unlink",
    "mkdir",
    "rmdir",
    "scandir",
    "listdir",
)
ON_HANDLES = ("fsync", "close", "fstat")


class Fallible:
    """A file, or what else stands for one, whose every call may fail."""

    def __init__(self, inner: Any, before: Callable[[str], None]) -> None:
        self._inner = inner
        self._before = before

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value) or name == "fileno":
            return value

        def call(*arguments: Any, **named: Any) -> Any:
            if name == "close":
                value()
            self._before(name)
            return value(*arguments, **named)

        return call

    def __iter__(self) -> Any:
        return iter(self._inner)

    def __enter__(self) -> Fallible:
        self._inner.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._inner.__exit__(*raised)
        if raised[0] is None:
            self._before("close")


@contextmanager
def failing(folder: Path, at: int | None, error: int = errno.EIO) -> Iterator[list[str]]:
    """Call ``at`` that concerns ``folder`` fails, and no other; yields the calls as they come."""
    calls: list[str] = []
    whole = os.path.abspath(folder)

    def before(name: str, path: Any = "") -> None:
        calls.append(f"{name} {os.path.relpath(path, whole) if path else ''}")
        if len(calls) - 1 == at:
            raise OSError(error, os.strerror(error), "the call that fails")

    def concerns(path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and os.path.abspath(path).startswith(whole)

    def on_path(name: str, original: Any) -> Any:
        def call(path: Any, *others: Any, **named: Any) -> Any:
            if concerns(path):
                before(name, path)
            return original(path, *others, **named)

        return call

    def on_handle(name: str, original: Any) -> Any:
        def call(handle: int) -> Any:
            if name == "close":
                original(handle)
                before(name)
                return None
            before(name)
            return original(handle)

        return call

    def opened(original: Any) -> Any:
        def call(path: Any, *others: Any, **named: Any) -> Any:
            if not concerns(path):
                return original(path, *others, **named)
            before("open", path)
            return Fallible(original(path, *others, **named), lambda name: before(name, path))

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ON_PATHS:
            patch.setattr(os, name, on_path(name, getattr(os, name)))
        for name in ON_HANDLES:
            patch.setattr(os, name, on_handle(name, getattr(os, name)))
        patch.setattr(builtins, "open", opened(open))
        patch.setattr(io, "open", builtins.open)
        patch.setattr(tensors, "safe_open", opened(tensors.safe_open))
        yield calls


def kept(steps: int) -> Any:
    return options(steps=steps, evaluate_every=1, save_every=1, keep=2)


def begin(folder: Path) -> None:
    start.train(kept(1), folder)


def go_on(folder: Path) -> None:
    """To step 3: an old checkpoint is deleted, and the options change."""
    start.resume(folder, config=kept(3))


@pytest.mark.parametrize("work", [begin, go_on])
def test_a_call_that_fails_once_loses_nothing(
    work: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "conclude", lambda *_: None)
    before = Path("before")
    start.train(kept(2), before)

    def fresh(name: str) -> Path:
        return Path(name) if work is begin else shutil.copytree(before, Path(name))

    whole = fresh("whole")
    with failing(whole, None) as calls:
        work(whole)
    wanted = content(whole)
    # Once for each kind of call and file, whatever the process and the step.
    chosen = {re.sub(r"\d+", "", call): number for number, call in reversed([*enumerate(calls)])}
    assert len(chosen) > 60
    refused = 0
    for number in chosen.values():
        folder = fresh(f"at-{number}")
        error = ERRORS[number % len(ERRORS)]
        place = f"{calls[number]} fails with {errno.errorcode[error]}"
        try:
            with failing(folder, number, error):
                work(folder)
        except MemspanError:
            refused += 1
            again = start.resume if work is begin and has_checkpoint(folder) else work
            if has_checkpoint(folder) and step_of(folder) == step_of(whole):
                with pytest.raises(MemspanError, match="is finished"):
                    again(folder)
            else:
                again(folder)
            assert content(folder) == wanted, place
        else:
            memspan.load(folder)
            # What could not be deleted is deleted later.
            assert content(folder).items() >= wanted.items(), place
    assert 40 < refused < len(chosen)


def has_checkpoint(folder: Path) -> bool:
    return folder.exists() and bool(checkpoints.steps_of(folder))
