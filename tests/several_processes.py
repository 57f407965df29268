"""What each process of a test runs: trainings one after the other, as a JSON file lists them.

Started by torchrun, so that many short trainings share the time that starting a process takes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from memspan import train
from memspan.config_files import read_config
from memspan.distributed.processes import ALONE, Processes, joined

torch.set_num_threads(1)
train.LOG_EVERY = 1


def run(job: dict[str, Any], processes: Processes = ALONE) -> None:
    """Train or resume in ``job["folder"]``, up to the step ``stop`` where there is one."""
    original, quiet = train.Trainer.update, Console(quiet=True)

    def update(self: train.Trainer) -> torch.Tensor | None:
        loss = original(self)
        # A signal that only one of them gets.
        if self.step == job.get("stop") and self.processes.rank == self.processes.size - 1:
            self.asked_to_stop = True
        return loss

    train.Trainer.update = update  # type: ignore[method-assign]
    try:
        if "config" in job:
            config = read_config(Path(job["config"]))
            train.train(config, Path(job["folder"]), quiet, None, processes)
        else:
            train.resume(Path(job["folder"]), quiet, processes)
    finally:
        train.Trainer.update = original  # type: ignore[method-assign]


if __name__ == "__main__":
    with joined() as processes:
        for job in json.loads(Path(sys.argv[1]).read_text()):
            run(job, processes)
