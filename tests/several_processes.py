"""Program of each process of a test: trainings one after the other."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from memspan.lab.data.streams import Segment, Streams
from memspan.lab.distributed.processes import ALONE, Processes, _end_with_launcher, joined
from memspan.lab.distributed.reports import BY_US
from memspan.lab.training import metrics, start, trainer, updates
from memspan.lab.training.optimisers import MakeOptimiser
from memspan.nn import NOT_SCORED
from memspan.ops.fast_weights import compiled as delta_rule_loop
from memspan.ops.feedback import compiled as feedback_loop
from tiny_runs import Odd, spoil_memory
from warm import Child

OWN: dict[str, MakeOptimiser] = {"odd": partial(Odd, noise=0.0)}
"""Without random numbers, which processes draw on their own."""


def run(job: dict[str, Any], processes: Processes = ALONE) -> None:
    """Train in ``job["folder"]`` with the options ``config``, or resume the run there, up to the step
    ``stop`` where there is one; each segment's last row is scored in part.

    ``copy``: the run to resume, which is left as it is. ``spoil``: the step before which the last row
    of memory becomes NaN. ``optimiser``: what makes it, by its name in ``OWN``.
    """
    original = updates.Updater.update
    next_segment = Streams.next

    def update(self: updates.Updater) -> torch.Tensor | None:
        state = self.state
        is_last = state.processes.rank == state.processes.size - 1
        if state.step == job.get("spoil") and is_last:
            spoil_memory(state, -1)
        loss = original(self)
        # A signal that only one of them gets.
        if state.step == job.get("stop") and is_last:
            os.kill(os.getpid(), signal.SIGINT)
        return loss

    def partly_scored(self: Streams) -> Segment:
        segment = next_segment(self)
        targets = segment.targets.clone()
        targets[-1, :4] = NOT_SCORED
        return replace(segment, targets=targets)

    folder = Path(job["folder"])
    own = OWN.get(job.get("optimiser", ""))
    if "copy" in job and processes.first:
        shutil.copytree(job["copy"], folder)
    processes.wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates.Updater, "update", update)
        patch.setattr(Streams, "next", partly_scored)
        if "config" in job:
            start.train(job["config"], folder, optimiser=own, processes=processes)
        else:
            start.resume(folder, optimiser=own, processes=processes)


def together(n_processes: int, jobs: list[dict[str, Any]]) -> None:
    """Run ``jobs`` in so many processes that meet as those of one run."""
    # A new file to meet at each time.
    meeting = os.path.join(tempfile.mkdtemp(dir="."), "processes")
    common = {"WORLD_SIZE": str(n_processes), "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    common |= {BY_US: os.path.abspath(meeting)}
    children = [
        Child(f"rank-{rank}", work, jobs, RANK=str(rank), LOCAL_RANK=str(rank), **common)
        for rank in range(n_processes)
    ]
    results = [child.ended() for child in children]
    assert all(status == 0 for status, _ in results), results


def work(jobs: list[dict[str, Any]]) -> None:
    """Run one process's part."""
    torch.set_num_threads(1)
    trainer.LOG_EVERY = 1
    metrics.plot = lambda *_: []
    with joined() as processes:
        for job in jobs:
            # Shown where it fails.
            print(job["folder"], file=sys.stderr)
            run(job, processes)


def wait_with_a_child() -> None:
    """Start a process that ends with this one, and write its number into ``pid``."""
    if not os.fork():
        _end_with_launcher()
        Path("pid").write_text(str(os.getpid()))
    time.sleep(60)


# In the process that others are forks of: loops in C are compiled once for all.
for loop in (delta_rule_loop, feedback_loop):
    loop.available(torch.zeros(()))
