"""Saving by all processes of a run together, while training goes on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from memspan.distributed.processes import LostProcessError, Processes, is_loss
from memspan.runs import checkpoints
from memspan.runs.run_lock import RunLock
from memspan.runs.shards import save_shards
from memspan.runs.state_file import Checkpoint, State


class SharedSaves:
    """Saves of a run, one at a time: each waits for the one before. All processes call all methods."""

    def __init__(self, folder: Path, lock: RunLock | None, processes: Processes, keep: int) -> None:
        """
        Args:
            folder: the run's.
            lock: of that folder, in the first process; None in the others.
            processes: all of the run's.
            keep: newest checkpoints that stay (0: all).
        """
        self._folder, self._lock, self._processes, self._keep = folder, lock, processes, keep
        # Not training's own group, whose collectives must not mix with these.
        self._group = dist.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, "memspan-save")
        self._last: Future[None] | None = None

    def begin(self, checkpoint: Checkpoint, best: bool) -> None:
        """Start a save; the tensors of ``checkpoint`` may change as soon as this returns.

        Args:
            checkpoint: this process's part of what to save.
            best: publish its weights, the best so far.

        Raises:
            MemspanError: the save before this one failed.
        """
        self.finish()
        state = checkpoint.state
        new = None
        if self._lock is not None:
            new = checkpoints.new_shards(self._lock.folder, state["step"])
        folder = self._processes.of_first(new)
        if folder is None:
            return
        writing = save_shards(folder, checkpoint, self._group)
        self._last = self._thread.submit(self._commit, writing, state, best)

    def finish(self) -> None:
        """Wait for the last save.

        Raises:
            MemspanError: it failed.
        """
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def _commit(self, writing: Future[None], state: State, best: bool) -> None:
        try:
            writing.result()
        # torch.distributed.checkpoint wraps every process's failure in one BaseException.
        except BaseException as error:
            cause = next((e for e, _ in getattr(error, "failures", {}).values()), error)
            if is_loss(error) or is_loss(cause):
                raise LostProcessError(
                    "another process of the run has ended during a save: go on with --resume "
                    f"{self._folder}"
                ) from error
            if self._lock is not None:
                checkpoints.drop_shards(self._lock.folder, state["step"])
            raise checkpoints.failed_save(self._folder, cause) from error
        if self._lock is not None:
            checkpoints.commit_shards(self._lock, state, best, self._keep)
