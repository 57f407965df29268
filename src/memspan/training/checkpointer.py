"""A run's checkpoints while it trains, in its folder wherever that is moved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from memspan.runs import checkpoints
from memspan.runs.run_lock import RunLock
from memspan.training.state import TrainingState

if TYPE_CHECKING:
    from memspan.runs.shared_saves import SharedSaves


class Checkpointer:
    """Writes checkpoints of ``state``; of several processes all call all methods."""

    def __init__(
        self, state: TrainingState, folder: Path, lock: RunLock | None, console: Console
    ) -> None:
        """``lock``: on the run's ``folder``; None in processes other than the first."""
        self.folder = folder
        """Where the run's folder is, as far as known."""
        self.moved_from: Path | None = None
        """Where it was when training began, if it was moved since."""
        self._state, self._lock, self._console = state, lock, console
        self._keep = state.config.train.keep
        self._shared: SharedSaves | None = None

    def save(self) -> None:
        """Write a checkpoint of all that the next step depends on.

        Raises:
            MemspanError: the disk is full, or the run's folder is lost.
        """
        state = self._state
        # Without validations there is no best yet: the latest weights are published.
        best = state.best_step in (None, state.step)
        self._follow()
        if self._lock is not None:
            for line in self._lock.restore():
                self._console.print(line)
        if state.mesh is not None:
            self._shared = self._shared or self._shared_saves()
            self._shared.begin(state.snapshot(self.folder), best)
        else:
            assert self._lock is not None
            checkpoints.save(self._lock, state.snapshot(self.folder), best, self._keep)

    def latest_in_words(self) -> str:
        """Which checkpoint there is to go on from."""
        steps = checkpoints.steps_of(self.folder)
        if not steps:
            return f"there was no checkpoint in {self.folder} yet"
        return f"the checkpoint of step {steps[-1]} is kept in {self.folder}"

    def finish(self) -> None:
        """Wait until all saves of all processes are complete."""
        if self._shared is not None:
            self._shared.finish()
            self._state.processes.wait()

    def export(self) -> None:
        """At the end: what several processes wrote becomes the checkpoints of a single one."""
        self._follow()
        if self._shared is not None and self._state.processes.first:
            checkpoints.export(self.folder, self._keep)

    @property
    def moved(self) -> bool:
        """Whether the folder was moved since training began."""
        is_moving = self._lock is not None and self._lock.moved()
        return self.moved_from is not None or is_moving

    def _follow(self) -> None:
        """Find the folder where it was moved to.

        Raises:
            MemspanError: it was deleted, or the system does not tell where it is.
        """
        if self._lock is not None and self._lock.moved():
            self.moved_from = self.folder
            self._lock.follow()
            self.folder = self._lock.folder

    def _shared_saves(self) -> SharedSaves:
        # Lazy: one process need not load torch.distributed.checkpoint.
        from memspan.runs.shared_saves import SharedSaves

        return SharedSaves(self.folder, self._lock, self._state.processes, self._keep)
