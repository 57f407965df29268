"""`memspan` in other processes: forks of this one, which has already imported torch, or new ones."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from memspan import cli

LIMIT = 300
"""Seconds after which a process counts as hanging."""
MARK = "MEMSPAN_CHAOS"
"""Environment variable that marks the processes of one start."""


@dataclass
class Process:
    """A forked `memspan`: its id and where its output goes."""

    pid: int
    output: Path

    def wait(self) -> Done:
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                out, err = (self.output.with_suffix(s).read_text() for s in (".out", ".err"))
                return Done(os.waitstatus_to_exitcode(status), out, err)
            time.sleep(0.005)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return Done(-1, "", f"hangs: not done after {LIMIT} s")

    def kill(self) -> Done:
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def refused(self) -> str | None:
        """The line, if there is exactly one and the status is 2."""
        lines = self.err.strip().splitlines()
        one = len(lines) == 1 and lines[0].startswith("memspan: ") and lines[0].isprintable()
        return lines[0] if self.code == 2 and one else None

    def __str__(self) -> str:
        return f"status {self.code}: {self.err.strip()[-400:]}"


numbers = itertools.count()


def start(arguments: list[str], home: Path, hook: Callable[[], None] = lambda: None) -> Process:
    """Fork a `memspan` in `home`; `hook` runs in it first."""
    output = home / f"process-{next(numbers)}"
    pid = os.fork()
    if pid:
        return Process(pid, output)
    code = 70
    try:
        for descriptor, suffix in ((1, ".out"), (2, ".err")):
            handle = os.open(output.with_suffix(suffix), os.O_WRONLY | os.O_CREAT, 0o644)
            os.dup2(handle, descriptor)
        os.chdir(home)
        os.environ["MEMSPAN_CACHE"] = str(home / "cache")
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        torch.set_num_threads(1)
        hook()
        cli.main(arguments)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def run(arguments: list[str], home: Path, hook: Callable[[], None] = lambda: None) -> Done:
    return start(arguments, home, hook).wait()


@contextlib.contextmanager
def new_process(arguments: list[str], home: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A new `memspan` and the mark of the processes it starts, which are all killed at the end."""
    mark = f"{home}/{next(numbers)}"
    process = subprocess.Popen(
        [sys.executable, "-m", "memspan", *arguments],
        cwd=home,
        env=os.environ | {"MEMSPAN_CACHE": str(home / "cache"), "OMP_NUM_THREADS": "1", MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, mark
    finally:
        for pid in started_by(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def started_by(mark: str) -> dict[int, dict[str, str]]:
    """The living processes that a `memspan` has started, and its own, with their environments.

    The launcher puts each into its own session, so they are identified by what they inherit.
    """
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                content = (entry / "environ").read_bytes().decode(errors="replace")
                values = dict(v.split("=", 1) for v in content.split("\0") if "=" in v)
                if values.get(MARK) == mark:
                    found[int(entry.name)] = values
    return found


def ended(process: subprocess.Popen[str], seconds: float = LIMIT) -> Done:
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return Done(-1, "", f"hangs: not done after {seconds} s")
    return Done(process.returncode, out, err)


def run_new(arguments: list[str], home: Path) -> Done:
    with new_process(arguments, home) as (process, _):
        return ended(process)
