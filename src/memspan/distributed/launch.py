"""Launches several processes of ``memspan`` on one machine, with torch's own launcher."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import uuid

from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from memspan.distributed.reports import BY_US, LOST, cores, has_stopped
from memspan.invocation import PROGRAM, program

SAVE_SECONDS = 120
"""Time for a run that was asked to stop to write its last checkpoint."""


class RunEndedError(Exception):
    """The processes ended, for the reason of the one that failed first, before their work was done."""

    def __init__(self, line: str, status: int) -> None:
        super().__init__(line)
        self.line, self.status = line, status


def launch(arguments: list[str], n_processes: int) -> None:
    """Run ``memspan`` with ``arguments`` in ``n_processes`` processes; returns when all are done.

    Ctrl-C, SIGTERM and SIGHUP reach them all.
    """
    settings = {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SAVE_SECONDS),
        "OMP_NUM_THREADS": str(max(1, cores() // n_processes)),
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    # Overrides settings for runs on several machines: this one uses only the loopback interface.
    os.environ |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), _loopback())
    for name in ("multiprocessing.api", "agent.server.api", "agent.server.local_elastic_agent"):
        # Silence torch's launcher: our one line has the cause.
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    # Accessible to this user alone: anyone who can write into it could run code anyway.
    with tempfile.TemporaryDirectory(prefix="memspan-") as folder:
        os.environ[PROGRAM] = program()
        os.environ[BY_US] = os.path.join(folder, "processes")
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=n_processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend=_OneMachine.NAME,
            rdzv_endpoint=os.path.join(folder, "launcher"),
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            # -P: as the console script, they import nothing from the current folder.
            elastic_launch(config, sys.executable)("-P", "-m", "memspan", *arguments)
        except SignalException as error:
            if error.sigval.name not in ("SIGINT", "SIGTERM", "SIGHUP"):
                raise RunEndedError(f"memspan: ended by {error.sigval.name}", 1) from None
            if not has_stopped():
                # Before or after training: no process has said how to continue.
                raise KeyboardInterrupt from None
        except ChildFailedError as error:
            raise _ended(error) from None


class _OneMachine(RendezvousHandler):
    """The rendezvous of a single launcher, through a file.

    torch's own handlers use a ``TCPStore``, which listens on all interfaces, authenticates nobody, and
    holds pickles that the launcher loads.
    """

    NAME = "memspan"

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._parameters = parameters

    def get_backend(self) -> str:
        return self.NAME

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        # The address is a placeholder: our processes meet through another file.
        address = RendezvousStoreInfo("127.0.0.1", 0)
        return RendezvousInfo(FileStore(self._parameters.endpoint), 0, 1, address)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing to close."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._parameters.run_id

    def shutdown(self) -> bool:
        return True


rendezvous_handler_registry.register(_OneMachine.NAME, _OneMachine)


def _loopback() -> str:
    """The name of the loopback interface."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), names[0])


def _ended(error: ChildFailedError) -> RunEndedError:
    """The failure that caused the others."""
    rank, failure = min(error.failures.items(), key=lambda pair: (_weight(pair[1]), pair[0]))
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
    """Sorts own errors first, then crashes, then SIGTERM, which the launcher sends to the remaining
    processes, then lost peers; ties by time."""
    if failure.exitcode == LOST:
        return 3, failure.timestamp
    if failure.exitcode == -signal.SIGTERM:
        return 2, failure.timestamp
    return int(failure.exitcode < 0), failure.timestamp
