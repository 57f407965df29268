"""The processes of a run: this one's rank, its rows, and collective operations.

Every process reads the same text and holds all tokens of a batch, but computes a contiguous share of
the rows, with their memories and losses. A single process does not communicate: every function returns
what it was given.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from memspan.errors import MemspanError, counted
from memspan.lab.distributed.reports import BY_US, LOST, agree_on_failures, is_worker

if TYPE_CHECKING:  # takes a second to import, which one process does not need
    from torch.distributed.device_mesh import DeviceMesh

TIMEOUT = timedelta(hours=12)
"""Limit for waiting for other processes: one of them may be scoring or writing."""
PARENT_CHECK_SECONDS = 0.2
"""Interval at which a process checks that its launcher still runs."""
LETTING_GO_SECONDS = 5.0
"""Maximum time that an ending process waits for its own threads."""

T = TypeVar("T")


class LostProcessError(MemspanError):
    """Raised when another process of the run has ended, which reports the cause itself."""

    status = LOST


@dataclass(frozen=True)
class Processes:
    """This process and the number of processes in the run."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Rank 0: prints and writes the run folder."""
        return self.rank == 0

    def rows(self, batch_size: int) -> slice:
        """This process's rows of a batch."""
        if batch_size % self.size:
            raise MemspanError(
                f"{batch_size} batch rows cannot be shared evenly by {self.size} processes: use a "
                f"number of processes that divides {batch_size}, or another --train.batch-size in a "
                "new run"
            )
        share = batch_size // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def mean(self, x: Tensor) -> Tensor:
        """The mean over all processes."""
        return x if self.size == 1 else self._summed(x) / self.size

    def total(self, number: float) -> float:
        """The sum over all processes, in float64."""
        if self.size == 1:
            return number
        return self._summed(torch.tensor(number, dtype=torch.float64)).item()

    def any(self, flag: bool) -> bool:
        """True if ``flag`` is set in any process."""
        return flag if self.size == 1 else self.total(float(flag)) > 0

    def all_rows(self, x: Tensor) -> Tensor:
        """All rows of ``x [B / size, ...]``, in order: ``[B, ...]``."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    def of_first(self, value: T) -> T:
        """The first process's ``value``, in all processes."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def in_turn(self, function: Callable[[], T]) -> T:
        """Call ``function`` in the first process, then in the others, to fill a cache once, say."""
        if self.first:
            result = function()
        self.wait()
        return result if self.first else function()

    def wait(self) -> None:
        """Wait until all processes call this."""
        self.any(False)

    def mesh(self, device: torch.device) -> DeviceMesh:
        """A one-dimensional mesh of all processes."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(device.type, (self.size,))

    def _summed(self, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x


ALONE = Processes()


def sharded(rows: Tensor, mesh: DeviceMesh) -> Tensor:
    """A DTensor of all rows; ``rows`` are this process's shard."""
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)


def whole(x: Tensor) -> Tensor:
    """``x``, gathered from all processes if it is sharded."""
    return x.full_tensor() if _is_shared(x) else x


def placed(x: Tensor, like: Tensor | None) -> Tensor:
    """``x``, the same in all processes, sharded as ``like`` is."""
    if not _is_shared(like) or _is_shared(x):
        return x
    from torch.distributed.tensor import distribute_tensor

    x = x.to(like.device)
    return distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)


def local(x: Tensor) -> Tensor:
    """This process's shard of ``x``; ``x`` itself if it is not sharded."""
    return x.to_local() if _is_shared(x) else x


def _is_shared(x: Tensor | None) -> TypeGuard[Any]:
    """True for a DTensor, which does not exist before its module is imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def own_device(device: torch.device) -> torch.device:
    """``device``, or on CUDA in a distributed run this process's own GPU."""
    if not is_worker() or device.type != "cuda":
        return device
    index = int(os.environ["LOCAL_RANK"])
    if index >= torch.cuda.device_count():
        raise MemspanError(
            f"this machine has {counted(torch.cuda.device_count(), 'GPU')}, fewer than processes: "
            "start one process per GPU"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@contextmanager
def joined() -> Iterator[Processes]:
    """Join the other processes that the launcher started, if there are any.

    Tensors on the CPU are exchanged by gloo, those on GPUs by NCCL.

    Raises:
        LostProcessError: another process has ended, or never joined.
    """
    if not is_worker():
        yield ALONE
        return
    _end_with_launcher()
    try:
        if BY_US in os.environ:
            store: Store = FileStore(os.environ[BY_US])
            store.set_timeout(TIMEOUT)
            rank = int(os.environ["RANK"])
            size = int(os.environ["WORLD_SIZE"])
        else:
            store, rank, size = next(iter(rendezvous("env://", timeout=TIMEOUT)))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        failures = PrefixStore("memspan", store)
        name = f"{rank}"
        agree_on_failures(lambda: failures.compare_set("failed", "", name) == name.encode())
        # Set here, since filters are process-wide and FSDP warns in every thread and pass.
        with warnings.catch_warnings():
            # Nothing of ours changes in place what a module returned.
            warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view")
            processes = Processes(rank, size)
            yield processes
            _wait_for_all()
        dist.destroy_process_group()
    except RuntimeError as error:
        if is_loss(error):
            raise LostProcessError(
                "another process of the run has ended: start all of them again, with --resume to go "
                "on from the last checkpoint"
            ) from error
        raise


def _wait_for_all() -> None:
    """Wait for the other processes, and until gloo's thread has released its last tensor: it needs the
    interpreter for that, and aborts the process if the interpreter is shutting down."""
    x = torch.zeros(1)
    dist.all_reduce(x)
    last = weakref.ref(x)
    end = time.monotonic() + LETTING_GO_SECONDS
    del x
    while last() is not None and time.monotonic() < end:
        time.sleep(0.001)


def is_loss(error: BaseException) -> bool:
    """True for an error that only means that another process has gone."""
    if isinstance(error, dist.DistError):
        return True
    # gloo does not define exceptions in Python: its messages begin with its file and line, or name.
    return type(error) is RuntimeError and re.search(r"\bgloo\b", str(error), re.I) is not None


def _end_with_launcher() -> None:
    """End this process when its launcher ends, since nothing else would stop it from writing."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="launcher").start()
