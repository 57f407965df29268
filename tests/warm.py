"""Processes that start in no time: forks of one that has imported everything and runs no threads.

Each is like a fresh ``python -m memspan`` but for the two seconds that importing torch takes.
"""

from __future__ import annotations

import contextlib
import ipaddress
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
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
    "memspan.lab.cli",
    "memspan.lab.distributed.launch",
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


def workers(launcher: int) -> list[int]:
    done = subprocess.run(["pgrep", "-P", str(launcher)], capture_output=True, text=True)
    return [int(line) for line in done.stdout.split()]


def listeners(pid: int) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses at which a process takes connections."""
    found = []
    open_files = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            open_files.add(os.readlink(path))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *others = line.split()
            if state == "0A" and f"socket:[{others[5]}]" in open_files:
                words = struct.iter_unpack(">I", bytes.fromhex(local.partition(":")[0]))
                packed = b"".join(struct.pack("=I", *word) for word in words)
                found.append(ipaddress.ip_address(packed))
    return found


def wait_for(condition: Any, process: Child | None) -> Any:
    for _ in range(1200):
        if found := condition():
            return found
        assert process is None or process.poll() is None
        time.sleep(0.05)
    raise AssertionError("nothing happened for a minute")
