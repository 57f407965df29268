"""The training loop: truncated backpropagation through time, with memory carried from update to
update; and its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from memspan.errors import MemspanError, NonFiniteError
from memspan.lab.distributed.processes import LostProcessError, is_loss
from memspan.lab.invocation import command
from memspan.lab.printing import quoted
from memspan.lab.runs import checkpoints
from memspan.lab.runs.checkpoint_files import Checkpoint, State
from memspan.lab.runs.folder import RunLock
from memspan.lab.runs.shards import save_shards
from memspan.lab.training.metrics import MetricLogger, keep_sample, loggers
from memspan.lab.training.state import TrainingState
from memspan.lab.training.summary import conclude, introduce
from memspan.lab.training.terminal import progress, stoppable
from memspan.lab.training.updates import Updater
from memspan.lab.training.validation import Validation
from memspan.native.waiting import sharing_cores

OnStop = Callable[[int], None]
LOG_EVERY = 10
"""Steps between training records in metrics.jsonl."""


class Checkpointer:
    """Writes checkpoints of ``state``; all processes call all methods.

    Several processes save together while training goes on, one checkpoint at a time: each save waits
    for the previous one, and raises its error if it failed.
    """

    def __init__(self, state: TrainingState, folder: Path, lock: RunLock | None) -> None:
        """``lock``: on the run's ``folder``; None in processes other than the first."""
        self.folder = folder
        self._state = state
        self._lock = lock
        self._keep = state.config.train.keep
        self._last: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "memspan-save")
        if state.mesh is not None:
            # Not training's own group, whose collectives must not mix with these.
            self._group = dist.new_group(backend="gloo")

    def save(self) -> None:
        """Write a checkpoint of everything that the next step depends on.

        Raises:
            MemspanError: the disk is full, or the run's folder was moved or deleted.
        """
        state = self._state
        # Before the first validation the latest weights are published.
        best = state.best_step in (None, state.step)
        self.refuse_moved()
        if state.mesh is None:
            assert self._lock is not None
            checkpoints.save(self._lock, self._snapshot(), best, self._keep)
            return
        self._wait()
        new = None if self._lock is None else checkpoints.new_shards(self.folder, state.step)
        if (folder := state.processes.of_first(new)) is not None:
            checkpoint = self._snapshot()
            writing = save_shards(folder, checkpoint, self._group)
            self._last = self._thread.submit(self._commit, writing, checkpoint.state, best)

    def _snapshot(self) -> Checkpoint:
        try:
            return self._state.snapshot()
        except Exception as error:
            raise checkpoints.failed_save(self.folder, error) from error

    def refuse_moved(self) -> None:
        """Raise :class:`~memspan.errors.MemspanError` where the folder was moved or deleted."""
        if self._lock is not None:
            self._lock.refuse_moved()

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """If something fails because the folder is gone, report that instead."""
        try:
            yield
        except (OSError, MemspanError):
            self.refuse_moved()
            raise

    def finish(self) -> None:
        """Wait until all saves of all processes are complete."""
        self._wait()
        self._state.processes.wait()

    def export(self) -> None:
        """At the end: convert the checkpoints of several processes into those of one."""
        if self._state.mesh is not None and self._lock is not None:
            checkpoints.export(self.folder, self._keep)

    def _wait(self) -> None:
        if self._last is not None:
            self._last.result()

    def _commit(self, writing: Future[None], state: State, best: bool) -> None:
        try:
            writing.result()
        # torch.distributed.checkpoint wraps every process's failure in one BaseException.
        except BaseException as error:
            cause = next((e for e, _ in getattr(error, "failures", {}).values()), error)
            if is_loss(error) or is_loss(cause):
                raise LostProcessError(
                    "another process of the run has ended during a save: continue with --resume "
                    f"{self.folder}"
                ) from error
            if self._lock is not None:
                checkpoints.drop_shards(self.folder, state["step"])
            raise checkpoints.failed_save(self.folder, cause) from error
        if self._lock is not None:
            checkpoints.commit_shards(self._lock, state, best, self._keep)


class Trainer:
    """Trains a run. Each of several processes has one, and only the first logs."""

    def __init__(self, state: TrainingState, checkpointer: Checkpointer, console: Console) -> None:
        self.state = state
        self.checkpointer = checkpointer
        self.console = console
        self.updater = Updater(state)

    @sharing_cores()
    def fit(self, on_stop: OnStop | None = None) -> None:
        """Train to the last step, then score, sample and print a summary.

        ``on_stop``: called with the signal's number if one ended training early, in any process.

        Raises:
            MemspanError: a loss is not finite, the disk is full, the folder was moved or deleted.
        """
        state = self.state
        checkpointer = self.checkpointer
        options = self.state.config.train
        introduce(self.console, state, checkpointer.folder)
        writes = state.processes.first
        logged = loggers(checkpointer.folder, options.tracker, state.step) if writes else []
        metrics = MetricLogger(state, logged, self.console)
        asked: list[int] = []
        stopped = False
        with (
            closing(metrics),
            checkpointer.explaining(),
            stoppable(asked.append),
            progress(self.console, state.steps) as show,
        ):
            show(completed=state.step)
            while not state.is_finished:
                checkpointer.refuse_moved()
                # All processes stop before the same update.
                if stopped := state.processes.any(bool(asked)):
                    checkpointer.save()
                    break
                metrics.add(self._update())
                last = state.step == state.steps
                if last or state.step % LOG_EVERY == 0:
                    metrics.record_training(self.updater.statistics, show)
                if last or _is_due(options.evaluate_every, state.step):
                    self._validate(metrics)
                is_best = state.best_step == state.step
                if is_best or state.is_finished or _is_due(options.save_every, state.step):
                    checkpointer.save()
            checkpointer.finish()
        if stopped:
            again = command("train", "--resume", checkpointer.folder)
            self.console.print(f"stopped at step {state.step:,}; continue with: {again}")
            numbers = state.processes.all_rows(torch.tensor(asked[:1] or [0]))
            if on_stop is not None:
                on_stop(int(numbers.max()))
            return
        if state.stops_early:
            self.console.print(f"stopped early at step {state.step:,}: {state.patience_in_words()}")
        checkpointer.export()
        checkpointer.refuse_moved()
        if writes or state.parallel.sharded:
            conclude(self.console, state, checkpointer.folder)

    def _update(self) -> Tensor | None:
        try:
            return self.updater.update()
        except NonFiniteError as error:
            folder = self.checkpointer.folder
            if steps := checkpoints.steps_of(folder):
                kept = f"the checkpoint of step {steps[-1]} is kept in {folder}"
            else:
                kept = f"there was no checkpoint in {folder} yet"
            raise MemspanError(f"{error}; {kept}") from None

    def _validate(self, metrics: MetricLogger) -> None:
        state = self.state
        options = self.state.config.train
        validation = Validation(self.state)
        try:
            # Many streams: faster than one, and close enough to compare checkpoints.
            scores = validation.score(options.batch_size)
        except NonFiniteError as error:
            self.console.print(f"step {state.step:>6,}  validation: {error}", highlight=False)
            state.note_score(math.inf)
        else:
            state.note_score(scores.nats_per_token)
            if state.processes.first or state.parallel.sharded:
                reports = bool(self.updater.statistics)
                metrics.record_validation(scores, validation.statistics() if reports else {})
                if options.sample_tokens and state.step < state.steps:
                    text = validation.sample(min(options.sample_tokens, 80))
                    if state.processes.first:
                        keep_sample(self.checkpointer.folder, state.step, text)
                    self.console.print(quoted(text), markup=False, highlight=False)
        metrics.restart_clock()


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
