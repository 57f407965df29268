"""Launches several processes of ``memspan`` on one machine.

Starting, watching and stopping them is torch's part: ``start_processes``, which torchrun calls as well.
This file adds what torchrun does not do:

- No port is open: the processes meet through a file of this user, and gloo and NCCL are bound to the
  loopback interface. torchrun's store listens on all interfaces and unpickles what it is sent.
- Only one line is printed, about the failure that caused the others: no traceback, no table.
- A run that a signal stopped, with a checkpoint, ends with status 128 and the signal's number.
- The cores are divided among the processes; torchrun gives each a single thread.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping

from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    PContext,
    SignalException,
    start_processes,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from memspan.cores import cores
from memspan.lab.distributed.reports import BY_US, LOST, noted_stop
from memspan.lab.invocation import PROGRAM, program

SAVE_SECONDS = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 120))
"""Seconds that a run has for its last checkpoint when it is stopped; the variable is torchrun's."""
PASSED_ON = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
"""Signals that reach all processes, besides Ctrl-C."""


class RunEndedError(Exception):
    """The processes ended before their work was done; ``line`` says why the first one failed."""

    def __init__(self, line: str, status: int) -> None:
        super().__init__(line)
        self.line = line
        self.status = status


def launch(arguments: list[str], n_processes: int) -> int | None:
    """Run ``memspan`` with ``arguments`` in ``n_processes`` processes; returns when all are done.

    Ctrl-C and the signals in :data:`PASSED_ON` reach them all.

    Returns:
        The number of the signal that ended their run, with a checkpoint; None if they have finished.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // n_processes)))
    # Overrides a user's settings, which are for runs on several machines.
    os.environ |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), _loopback())
    # The variable is torch's own.
    os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", ",".join(("SIGINT", *PASSED_ON)))
    # Silence torch: our one line has the cause.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(n_processes))
    # The address is a placeholder: our processes meet through a file.
    shared = sizes | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    ranks = {rank: dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) for rank in range(n_processes)}
    # -P: as the console script, they import nothing from the current folder.
    called = dict.fromkeys(ranks, ("-P", "-m", "memspan", *arguments))
    # Accessible to this user alone: anyone who can write into it could run code anyway.
    with tempfile.TemporaryDirectory(prefix="memspan-") as folder:
        os.environ[PROGRAM] = program()
        os.environ[BY_US] = os.path.join(folder, "processes")
        variables = {rank: shared | own for rank, own in ranks.items()}
        logs = DefaultLogsSpecs(log_dir=folder)
        try:
            running = start_processes("memspan", sys.executable, called, variables, logs)
            failures = _failures(running)
        except SignalException as error:
            # Before or after training: no process has said how to continue.
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            line = f"memspan: ended by {error.sigval.name}"
            raise RunEndedError(line, 128 + error.sigval) from None
        if failures:
            raise _ended(failures)
        return noted_stop()


def _failures(running: PContext) -> Mapping[int, ProcessFailure]:
    """Wait for the processes, pass signals on to them, and return the failures by rank.

    Raises:
        SignalException: a signal ended them before they could write a checkpoint.
    """
    try:
        result = running.wait(period=0.1)
    except SignalException as error:
        running.close(error.sigval, SAVE_SECONDS)
        result = running.wait(timeout=0)
        if result is None or result.failures:
            raise
    finally:
        # After a second signal some may still run.
        running.close(timeout=SAVE_SECONDS)
    assert result is not None
    return result.failures


def _loopback() -> str:
    """The name of the loopback interface."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), names[0])


def _ended(failures: Mapping[int, ProcessFailure]) -> RunEndedError:
    """The error for the failure that caused the others."""
    rank, failure = min(failures.items(), key=lambda pair: (_weight(pair[1]), pair[0]))
    report: object = failure.message
    if isinstance(report, dict):
        return RunEndedError(report["message"], abs(failure.exitcode))
    how = failure.signal_name() if failure.exitcode < 0 else f"status {failure.exitcode}"
    line = (
        f"memspan: process {rank} of the run ended with {how}, and the others were stopped: go on "
        "from the last checkpoint with --resume"
    )
    return RunEndedError(line, 1)


def _weight(failure: ProcessFailure) -> tuple[int, int]:
    """Sort key: errors with a report, then crashes, then SIGTERM, which the launcher sends to the
    remaining processes, then lost peers; within each, by time."""
    if failure.exitcode == LOST:
        return 3, failure.timestamp
    if failure.exitcode == -signal.SIGTERM:
        return 2, failure.timestamp
    return int(failure.exitcode < 0), failure.timestamp
