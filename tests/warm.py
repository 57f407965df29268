"""Processes that start in no time: forks of one that has imported everything and runs no threads.

Each is like a fresh ``python -m memspan`` but for the two seconds that importing torch takes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any

import pytest

# Of the process that all are forks of: imported there, and inherited.
IMPORTS = (
    "several_processes",
    # Training imports it, which takes as long as all the others.
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor",
    "memspan.cli",
    "memspan.distributed.launch",
)
CONTEXT = multiprocessing.get_context("forkserver")


class Child:
    """A process that calls ``function(*arguments)`` in this one's folder and environment.

    What it prints goes to the file ``NAME.out``, its errors to ``NAME.err``.
    """

    def __init__(
        self, name: str, function: Callable[..., object], *arguments: Any, **variables: str
    ) -> None:
        self.name = name
        _begin()
        environment = os.environ | variables
        self._process = CONTEXT.Process(
            target=_call, args=(name, function, arguments, environment, os.getcwd()), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def ended(self, seconds: float = 300) -> tuple[int, str]:
        """The status and the errors, once it has ended; it must within ``seconds``."""
        self._process.join(seconds)
        status = self._process.exitcode
        if status is None:
            self._process.kill()
        with open(f"{self.name}.err") as file:
            errors = file.read()
        assert status is not None, f"{self.name} has not ended: {errors}"
        return status, errors


def _begin() -> None:
    """Start the process that all others are forks of, if it does not run."""
    CONTEXT.set_forkserver_preload(list(IMPORTS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()


def _call(
    name: str,
    function: Callable[..., object],
    arguments: tuple[Any, ...],
    environment: dict[str, str],
    folder: str,
) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, kind in ((1, "out"), (2, "err")):
        handle = os.open(f"{name}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, number)
        os.close(handle)
    function(*arguments)
