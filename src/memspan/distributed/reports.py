"""How a process that a launcher started says why it has failed: once for all of them.

No torch here: the command line's help must not wait for it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

BY_US = "MEMSPAN_LAUNCHED"
"""Set by our launcher, which reads the reports and prints the one that matters: the file through which
its processes find each other."""
LOST = 3
"""Exit status of a process that only lost another one."""


def is_worker() -> bool:
    """Whether a launcher started this process as one of several."""
    size = os.environ.get("WORLD_SIZE", "")
    return size.isdecimal() and int(size) > 1 and "RANK" in os.environ


def report_stop() -> None:
    """Tell our launcher, if there is one, that training has stopped as asked, saved, and said so."""
    if BY_US in os.environ:
        _stop_mark().touch()


def has_stopped() -> bool:
    """Whether a process of this launcher has said so."""
    return _stop_mark().exists()


def _stop_mark() -> Path:
    return Path(os.environ[BY_US]).with_name("stopped")


def leave(line: str, status: int) -> None:
    """Report ``line`` and end this process at once: threads may be waiting for processes that ended."""
    _write(line, status)
    if BY_US not in os.environ and _speaks():
        print(line, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _write(line: str, status: int) -> None:
    """In the form that torch's launchers collect and torchrun prints."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": line, "timestamp": str(int(time.time())), "status": status}
        report = {"message": {"message": line, "extraInfo": extra}}
        try:
            Path(path).write_text(json.dumps(report), encoding="utf-8")
        except OSError:
            # The line then goes where it can.
            print(line, file=sys.stderr)


def _speaks() -> bool:
    if "torch" not in sys.modules:
        # They have not met: all fail in the same way.
        return os.environ.get("RANK") == "0"
    from memspan.distributed.processes import speaks_for_all

    return speaks_for_all()
