"""Several processes of ``memspan`` on one machine, by torch's own launcher."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from memspan.distributed.reports import BY_US, LOST

SAVE_SECONDS = 120
"""How long a run that is to stop may take for its last checkpoint."""


class RunEndedError(Exception):
    """The processes have ended before their work was done: the line that says why, and the status."""

    def __init__(self, line: str, status: int) -> None:
        super().__init__(line)
        self.line, self.status = line, status


def launch(arguments: list[str], n_processes: int) -> None:
    """Run ``memspan`` with ``arguments`` in ``n_processes`` processes; returns when all are done.

    Ctrl-C and SIGTERM are passed on to them.

    Raises:
        RunEndedError: one of them failed; the others are stopped then.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    settings = {
        # One store for the launcher and the processes makes connecting fail after a restart.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SAVE_SECONDS),
        "OMP_NUM_THREADS": str(max(1, (cores or 1) // n_processes)),
        BY_US: "1",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    for name in ("multiprocessing.api", "agent.server.api", "agent.server.local_elastic_agent"):
        # What they tell is in the one line.
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="memspan-") as reports:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=n_processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=reports),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "memspan", *arguments)
        except SignalException as error:
            if error.sigval not in (signal.SIGINT, signal.SIGTERM):
                raise RunEndedError(f"memspan: ended by {error.sigval.name}", 1) from None
        except ChildFailedError as error:
            raise _ended(error) from None


def _ended(error: ChildFailedError) -> RunEndedError:
    """The failure that the others followed from."""
    rank, failure = min(error.failures.items(), key=lambda pair: (_weight(pair[1]), pair[0]))
    said: Any = failure.message
    if isinstance(said, dict):
        return RunEndedError(said["message"], abs(failure.exitcode))
    how = failure.signal_name() if failure.exitcode < 0 else f"status {failure.exitcode}"
    line = (
        f"memspan: process {rank} of the run ended with {how}, and the others were stopped: go on "
        "from the last checkpoint with --resume"
    )
    return RunEndedError(line, 1)


def _weight(failure: ProcessFailure) -> tuple[int, int]:
    """Its own mistake before a death, a death before the loss of another process, the first first.

    The launcher itself ends with SIGTERM those that are left.
    """
    if failure.exitcode == LOST:
        return 3, failure.timestamp
    if failure.exitcode == -signal.SIGTERM:
        return 2, failure.timestamp
    return int(failure.exitcode < 0), failure.timestamp
