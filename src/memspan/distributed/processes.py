"""The processes of a run: who this one is, which rows are its own, and what all must agree on.

Every process reads the same text and keeps the whole of a batch's tokens; of the rows, their memories
and the losses it has a contiguous share. With one process nothing is exchanged and every function
returns what it was given.
"""

from __future__ import annotations

import os
import sys
import threading
import time
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

from memspan.distributed.reports import BY_US, LOST
from memspan.errors import MemspanError

if TYPE_CHECKING:  # a second to import, which one process does not need
    from torch.distributed.device_mesh import DeviceMesh

TIMEOUT = timedelta(hours=12)
"""How long a process waits for the others: one of them may be scoring or writing meanwhile."""
PARENT_CHECK_SECONDS = 0.2

T = TypeVar("T")
_failures: Callable[[], bool] | None = None


class LostProcessError(MemspanError):
    """Another process of the run has ended; why, is said there."""

    status = LOST


@dataclass(frozen=True)
class Processes:
    """This process among those of the run."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that speaks and keeps the run's folder."""
        return self.rank == 0

    def rows(self, batch_size: int) -> slice:
        """The rows of a batch that are this process's.

        Raises:
            MemspanError: they cannot be shared out evenly.
        """
        if batch_size % self.size:
            raise MemspanError(
                f"{batch_size} batch rows cannot be shared by {self.size} processes evenly: use a "
                f"number of processes that divides {batch_size}, or another --train.batch-size in "
                "a new run"
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
        """Whether it is so in any process."""
        return flag if self.size == 1 else self.total(float(flag)) > 0

    def all_rows(self, x: Tensor) -> Tensor:
        """All rows of ``x [B / size, ...]``, in order: ``[B, ...]``."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    def of_first(self, value: T) -> T:
        """The first process's ``value``, in all."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def in_turn(self, function: Callable[[], T]) -> T:
        """What ``function`` returns; the first process calls it before the others do."""
        if self.first:
            result = function()
        self.wait()
        return result if self.first else function()

    def wait(self) -> None:
        """Until all processes are here."""
        self.any(False)

    def mesh(self, device: torch.device) -> DeviceMesh:
        """All processes in a line."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(device.type, (self.size,))

    def _summed(self, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x


ALONE = Processes()


def sharded(rows: Tensor, mesh: DeviceMesh) -> Tensor:
    """This process's rows as its part of one tensor with all rows, a DTensor."""
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)


def whole(x: Tensor) -> Tensor:
    """``x``, collected from all processes where each has a part."""
    return x.full_tensor() if _is_shared(x) else x


def placed(x: Tensor, like: Tensor | None) -> Tensor:
    """``x``, the same in all processes, laid out over them as ``like`` is."""
    if not _is_shared(like) or _is_shared(x):
        return x
    from torch.distributed.tensor import distribute_tensor

    x = x.to(like.device)
    return distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)


def local(x: Tensor) -> Tensor:
    """This process's part of ``x``."""
    return x.to_local() if _is_shared(x) else x


def _is_shared(x: Tensor | None) -> TypeGuard[Any]:
    """Whether ``x`` is a DTensor; there is none while their module is not imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def launched() -> bool:
    """Whether a launcher, torchrun's or ours, has started this process as one of several.

    Raises:
        MemspanError: one of the numbers that launchers set is none.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    for name in names:
        value = os.environ.get(name)
        if value and not (value.isdecimal() and len(value) < 10):
            raise MemspanError(
                f"the environment has {name}={value}, which is no number: unset it, or start with "
                "torchrun or --nproc"
            )
    found = all(os.environ.get(name) for name in (*names, "MASTER_ADDR"))
    return found and int(os.environ["WORLD_SIZE"]) > 1


def own_device(device: torch.device) -> torch.device:
    """The GPU of this process on its machine, where the run is on GPUs."""
    if not launched() or device.type != "cuda":
        return device
    index = int(os.environ["LOCAL_RANK"])
    if index >= torch.cuda.device_count():
        raise MemspanError(
            f"this machine has {torch.cuda.device_count()} GPUs for more processes than that: "
            "start one process per GPU"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@contextmanager
def joined() -> Iterator[Processes]:
    """Meet the other processes that the launcher started, if there are any.

    gloo carries what is on the CPU, NCCL what is on GPUs.

    Raises:
        LostProcessError: another process has ended, or never came.
    """
    if not launched():
        yield ALONE
        return
    global _failures
    _end_with_the_launcher()
    try:
        store, rank, size = _met()
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        failures = PrefixStore("memspan", store)
        _failures = lambda: failures.compare_set("failed", "", f"{rank}") == f"{rank}".encode()  # noqa: E731
        processes = Processes(rank, size)
        yield processes
        processes.wait()
        dist.destroy_process_group()
    except RuntimeError as error:
        if is_loss(error):
            raise LostProcessError(
                "another process of the run has ended: start all of them again, with --resume to go "
                "on from the last checkpoint"
            ) from error
        raise


def _met() -> tuple[Store, int, int]:
    """Where the processes leave notes for each other, this one's rank, and their number."""
    if BY_US not in os.environ:
        return next(iter(rendezvous("env://", timeout=TIMEOUT)))
    store = FileStore(os.environ[BY_US])
    store.set_timeout(TIMEOUT)
    return store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def is_loss(error: BaseException) -> bool:
    """Whether an error only says that another process has gone."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def speaks_for_all() -> bool:
    """Whether this process, which has failed, is to say why: the first one to ask is."""
    if _failures is None:
        # They have not met: all fail in the same way.
        return os.environ.get("RANK", "0") == "0"
    try:
        return _failures()
    except RuntimeError:
        return True


def _end_with_the_launcher() -> None:
    """A launcher that is killed leaves its processes behind, and they would write on."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="launcher").start()
