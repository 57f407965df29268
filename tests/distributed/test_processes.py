"""What each of several processes does for itself."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist
from torch import Tensor

from memspan.distributed import processes


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
