"""Detects launched processes, and reports a failure once for all of them.

No torch here: the command line's help must not wait for it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

BY_US = "MEMSPAN_LAUNCHED"
"""Environment variable set by our launcher, which prints the report: the file where processes meet."""
STOPPED = "-stopped"
"""Suffix of another file, which holds the number of the signal that ended the run."""
LAUNCHER_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
"""Environment variables that torchrun and our launcher set; with them, ``MASTER_ADDR``."""
LOST = 3
"""Exit status of a process that ended because it lost another one."""
_is_first_to_fail: Callable[[], bool] | None = None


def is_worker() -> bool:
    """True if torchrun or our launcher started this process as one of several."""
    numbers = {name: os.environ.get(name, "") for name in LAUNCHER_NUMBERS}
    complete = all(map(str.isdecimal, numbers.values())) and bool(os.environ.get("MASTER_ADDR"))
    return complete and int(numbers["WORLD_SIZE"]) > 1


def agree_on_failures(is_first: Callable[[], bool]) -> None:
    """Let ``is_first`` decide which failed process reports: it is True in the first one to ask."""
    global _is_first_to_fail
    _is_first_to_fail = is_first


def leave(line: str, status: int) -> None:
    """Report ``line`` and end this process at once: its threads may wait for processes that ended."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # In the form that torch's launchers collect and torchrun prints.
        extra = {"py_callstack": line, "timestamp": str(int(time.time())), "status": status}
        report = {"message": {"message": line, "extraInfo": extra}}
        try:
            Path(path).write_text(json.dumps(report), encoding="utf-8")
        except OSError:
            print(line, file=sys.stderr)
    if BY_US not in os.environ and _reports_for_all():
        print(line, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def note_stop(number: int) -> None:
    """Tell our launcher that the signal of this number has ended the run, with a checkpoint."""
    Path(os.environ[BY_US] + STOPPED).write_text(str(number))


def noted_stop() -> int | None:
    """For the launcher: the number that a process has noted; None if the run was not stopped."""
    noted = Path(os.environ[BY_US] + STOPPED)
    return int(noted.read_text()) if noted.exists() else None


def _reports_for_all() -> bool:
    """True in the process that reports for all, the first to ask."""
    if _is_first_to_fail is None:
        # The processes have not joined yet: all fail in the same way.
        return os.environ.get("RANK", "0") == "0"
    try:
        return _is_first_to_fail()
    except RuntimeError:
        # The store has gone with the process that held it.
        return True
