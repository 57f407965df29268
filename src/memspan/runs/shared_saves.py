"""Checkpoints that all processes of a run write together, while training goes on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from memspan.distributed.processes import LostProcessError, Processes, is_loss
from memspan.runs import checkpoints
from memspan.runs.checkpoints import Checkpoint
from memspan.runs.claim import Claim
from memspan.runs.shards import save_shards


class SharedSaves:
    """One save at a time: the next one waits for the last. All processes call all methods."""

    def __init__(self, folder: Path, claim: Claim | None, processes: Processes) -> None:
        """``claim``: the first process's."""
        self._folder, self._claim, self._processes = folder, claim, processes
        # Apart from training's own group, whose turns it must not take.
        self._group = dist.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, "memspan-save")
        self._last: Future[None] | None = None

    def begin(self, saved: Checkpoint, best: bool) -> None:
        """Start a save; ``saved`` may change as soon as this returns.

        Raises:
            MemspanError: the save before this one failed.
        """
        self.finish()
        step = saved.state["step"]
        new = None if self._claim is None else checkpoints.new_shards(self._claim.folder, step)
        folder = self._processes.of_first(new)
        if folder is None:
            return
        tensors: dict[str, Tensor] = {f"model/{n}": t for n, t in saved.weights.items()}
        writing = save_shards(folder, tensors | saved.training, self._group)
        self._last = self._thread.submit(self._end, writing, saved.state, best)

    def finish(self) -> None:
        """Wait for the last save.

        Raises:
            MemspanError: it failed.
        """
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def _end(self, writing: Future[None], state: dict[str, Any], best: bool) -> None:
        try:
            writing.result()
        # All that goes wrong in any process comes as one exception, which is none of Exception's.
        except BaseException as error:
            cause = next((e for e, _ in getattr(error, "failures", {}).values()), error)
            if is_loss(error) or is_loss(cause):
                raise LostProcessError(
                    "another process of the run has ended during a save: go on with --resume "
                    f"{self._folder}"
                ) from error
            if self._claim is not None:
                checkpoints.drop_shards(self._claim.folder, state["step"])
            raise checkpoints.unsaved(self._folder, cause) from error
        if self._claim is not None:
            checkpoints.commit_shards(self._claim, state, best)
