"""A run's checkpoints while it trains."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import torch.distributed as dist

from memspan.distributed.processes import LostProcessError, is_loss
from memspan.runs import checkpoints
from memspan.runs.checkpoint_files import Checkpoint, State
from memspan.runs.folder import RunLock
from memspan.runs.shards import save_shards
from memspan.training.state import TrainingState


class Checkpointer:
    """Writes checkpoints of ``state``; all processes call all methods.

    Several processes save together while training goes on, one checkpoint at a time: each save waits
    for the previous one, and raises its error if it failed.
    """

    def __init__(self, state: TrainingState, folder: Path, lock: RunLock | None) -> None:
        """``lock``: on the run's ``folder``; None in processes other than the first."""
        self.folder = folder
        self._state, self._lock = state, lock
        self._keep = state.config.train.keep
        self._last: Future[None] | None = None

    def save(self) -> None:
        """Write a checkpoint of everything that the next step depends on.

        Raises:
            MemspanError: the disk is full, or the run's folder was moved or deleted.
        """
        state = self._state
        # Before a validation no weights are best: the latest are published.
        best = state.best_step in (None, state.step)
        if self._lock is not None:
            self._lock.refuse_moved()
        if state.mesh is not None:
            self._begin(state.snapshot(), best)
        else:
            assert self._lock is not None
            checkpoints.save(self._lock, state.snapshot(), best, self._keep)

    def latest_in_words(self) -> str:
        """The checkpoint from which training can continue, for messages."""
        steps = checkpoints.steps_of(self.folder)
        if not steps:
            return f"there was no checkpoint in {self.folder} yet"
        return f"the checkpoint of step {steps[-1]} is kept in {self.folder}"

    def refuse_moved(self) -> None:
        """Raise :class:`~memspan.errors.MemspanError` where the folder was moved or deleted."""
        if self._lock is not None:
            self._lock.refuse_moved()

    def finish(self) -> None:
        """Wait until all saves of all processes are complete."""
        if self._state.mesh is not None:
            self._wait()
            self._state.processes.wait()

    def export(self) -> None:
        """At the end: convert the checkpoints of several processes into those of one."""
        if self._state.mesh is not None and self._state.processes.first:
            checkpoints.export(self.folder, self._keep)

    def _begin(self, checkpoint: Checkpoint, best: bool) -> None:
        """Start a save; the tensors of ``checkpoint`` may change as soon as this returns."""
        self._wait()
        step, new = checkpoint.state["step"], None
        if self._lock is not None:
            new = checkpoints.new_shards(self.folder, step)
        folder = self._state.processes.of_first(new)
        if folder is not None:
            writing = save_shards(folder, checkpoint, self._group)
            self._last = self._thread.submit(self._commit, writing, checkpoint.state, best)

    def _wait(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.result()

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        # Not training's own group, whose collectives must not mix with these.
        return dist.new_group(backend="gloo")

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "memspan-save")

    def _commit(self, writing: Future[None], state: State, best: bool) -> None:
        try:
            writing.result()
        # torch.distributed.checkpoint wraps every process's failure in one BaseException.
        except BaseException as error:
            cause = next((e for e, _ in getattr(error, "failures", {}).values()), error)
            if is_loss(error) or is_loss(cause):
                raise LostProcessError(
                    "another process of the run has ended during a save: go on with --resume "
                    f"{self.folder}"
                ) from error
            if self._lock is not None:
                checkpoints.drop_shards(self.folder, state["step"])
            raise checkpoints.failed_save(self.folder, cause) from error
        if self._lock is not None:
            checkpoints.commit_shards(self._lock, state, best, self._keep)
