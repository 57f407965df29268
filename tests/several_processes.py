"""What each process of a test runs: trainings one after the other, as a JSON file lists them.

Started by torchrun, so that many short trainings share the time that starting a process takes.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"

import torch

from memspan.data.streams import Segment, Streams
from memspan.distributed.processes import ALONE, Processes, joined
from memspan.nn import NOT_SCORED
from memspan.runs.config_files import read_config
from memspan.training import metrics, start, trainer, updates


def run(job: dict[str, Any], processes: Processes = ALONE) -> None:
    """Train or resume in ``job["folder"]``, up to the step ``stop`` where there is one.

    ``copy``: the run to resume, which is left as it is. ``spoil``: the step before which the last row
    of memory becomes NaN. ``unscored``: tokens of each segment's last row that are not scored.
    """
    original = updates.Updater.update
    next_segment = Streams.next

    def update(self: updates.Updater) -> torch.Tensor | None:
        if (
            self.state.step == job.get("spoil")
            and self.state.processes.rank == self.state.processes.size - 1
        ):
            last = (
                torch.arange(len(self.state.memory.tokens_seen))
                == len(self.state.memory.tokens_seen) - 1
            )
            self.state.memory = self.state.memory.map(
                lambda t: (
                    t.masked_fill(last.view(-1, *[1] * (t.dim() - 1)), math.nan)
                    if t.is_floating_point()
                    else t
                )
            )
        loss = original(self)
        # A signal that only one of them gets.
        if (
            self.state.step == job.get("stop")
            and self.state.processes.rank == self.state.processes.size - 1
        ):
            os.kill(os.getpid(), signal.SIGINT)
        return loss

    def partly_scored(self: Streams) -> Segment:
        segment = next_segment(self)
        targets = segment.targets.clone()
        targets[-1, : job["unscored"]] = NOT_SCORED
        return replace(segment, targets=targets)

    folder = Path(job["folder"])
    if "copy" in job and processes.first:
        shutil.copytree(job["copy"], folder)
    processes.wait()
    updates.Updater.update = update  # type: ignore[method-assign]
    if "unscored" in job:
        Streams.next = partly_scored  # type: ignore[method-assign]
    try:
        if "config" in job:
            config = read_config(Path(job["config"]))
            start.train(config, folder, processes=processes)
        else:
            start.resume(folder, processes=processes)
    finally:
        updates.Updater.update = original  # type: ignore[method-assign]
        Streams.next = next_segment  # type: ignore[method-assign]


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer.LOG_EVERY = 1
    # Pictures take seconds.
    metrics.plot = lambda *_: []
    with joined() as processes:
        for job in json.loads(Path(sys.argv[1]).read_text()):
            run(job, processes)
