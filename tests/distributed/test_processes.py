"""The part of each process in a run of several."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist
from torch import Tensor

from memspan.lab.distributed import processes, reports
from memspan.lab.distributed.processes import Processes, is_loss


def test_the_end_waits_until_the_last_tensor_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo's thread still holds it for a moment after the call has returned."""
    held: list[Tensor] = []
    thread = threading.Thread(target=lambda: (time.sleep(0.05), held.clear()))

    def all_reduce(x: Tensor) -> None:
        held.append(x)
        thread.start()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    processes._wait_for_all()
    assert not held
    thread.join()


def test_rows_are_contiguous_and_cover_the_batch() -> None:
    shares = [Processes(rank, 4).rows(12) for rank in range(4)]
    assert [row for share in shares for row in range(12)[share]] == list(range(12))
    assert [Processes().rows(5)] == [slice(0, 5)]


def test_the_loss_of_a_process_is_told_from_other_errors() -> None:
    """gloo's errors are plain RuntimeErrors; a path may hold its name by chance."""
    gone = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer"
    assert is_loss(RuntimeError(gone))
    assert is_loss(dist.DistNetworkError("the store has gone"))
    assert not is_loss(RuntimeError("cannot read /data/igloo/text.txt"))
    assert not is_loss(OSError(28, "No space left on device", "/data/gloo/run"))


def test_a_process_is_a_launchers_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "1"}
    for name, value in (variables | {"MASTER_ADDR": "localhost"}).items():
        monkeypatch.setenv(name, value)
    assert reports.is_worker()
    for name, value in (("WORLD_SIZE", "1"), ("RANK", "x"), ("MASTER_ADDR", "")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert not reports.is_worker()
