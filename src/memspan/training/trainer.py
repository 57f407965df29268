"""The training loop: truncated back-propagation through time, memory carried from update to update."""

from __future__ import annotations

import math

from rich.console import Console
from torch import Tensor

from memspan.distributed.reports import report_stop
from memspan.errors import MemspanError, NonFiniteError
from memspan.invocation import command
from memspan.training.checkpointer import Checkpointer
from memspan.training.metrics import MetricLogger, loggers
from memspan.training.state import TrainingState
from memspan.training.summary import conclude, introduce
from memspan.training.terminal import progress, stoppable
from memspan.training.updates import Updater
from memspan.training.validation import Validation

LOG_EVERY = 10
"""Steps between training records in metrics.jsonl."""


class Trainer:
    """Trains a run. Each of several processes has one, and only the first logs."""

    def __init__(self, state: TrainingState, checkpointer: Checkpointer, console: Console) -> None:
        self.state, self.checkpointer, self.console = state, checkpointer, console
        self.updater, self.asked_to_stop = Updater(state), False

    def fit(self) -> None:
        """Train to the last step, then score, sample and say what was written.

        Raises:
            MemspanError: a loss is not finite, the disk is full, the folder was moved or deleted.
        """
        state, checkpointer, options = self.state, self.checkpointer, self.state.config.train
        introduce(self.console, state, checkpointer.folder)
        writes = state.processes.first
        logged = loggers(checkpointer.folder, options.tracker, state.step) if writes else []
        metrics, stopped = MetricLogger(state, logged, self.console), False
        with stoppable(self.stop), progress(self.console, state.steps) as show:
            show(completed=state.step)
            while not state.is_finished and not (stopped := self._is_stopping()):
                metrics.add(self._update())
                last = state.step == state.steps
                if last or state.step % LOG_EVERY == 0:
                    metrics.record_training(self.updater.statistics, show)
                if last or _is_due(options.evaluate_every, state.step):
                    self._validate(metrics)
                is_best = state.best_step == state.step
                if is_best or state.is_finished or _is_due(options.save_every, state.step):
                    checkpointer.save()
            if stopped:
                checkpointer.save()
            checkpointer.finish()
        metrics.close()
        if stopped:
            self._report_stop()
            return
        if state.stops_early:
            self.console.print(f"stopped early at step {state.step:,}: {state.patience_in_words()}")
        checkpointer.export()
        if writes or state.parallel.sharded:
            conclude(self.console, state, checkpointer.folder)

    def _update(self) -> Tensor | None:
        try:
            return self.updater.update()
        except NonFiniteError as error:
            raise MemspanError(f"{error}; {self.checkpointer.latest_in_words()}") from None

    def _validate(self, metrics: MetricLogger) -> None:
        state, options, validation = self.state, self.state.config.train, Validation(self.state)
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
                    self.console.print(f"  sample: {text!r}", markup=False, highlight=False)
        metrics.restart_clock()

    def stop(self) -> None:
        """Stop before the next update, with a checkpoint."""
        self.asked_to_stop = True

    def _is_stopping(self) -> bool:
        """Whether to stop before the next update: all processes do, or none."""
        self.checkpointer.refuse_moved()
        return self.state.processes.any(self.asked_to_stop)

    def _report_stop(self) -> None:
        again = command("train", "--resume", self.checkpointer.folder)
        self.console.print(f"stopped at step {self.state.step:,}; continue with: {again}")
        report_stop()


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
