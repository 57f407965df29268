"""The records of a run while it trains: all of them to its loggers, and in short to the terminal."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from rich.console import Console
from torch import Tensor

from memspan.evaluation import Scores, percent
from memspan.training.loggers import Logger, Record
from memspan.training.optimisers import learning_rate
from memspan.training.state import TrainingState


class MetricLogger:
    """Collects losses from record to record."""

    def __init__(self, state: TrainingState, loggers: Sequence[Logger], console: Console) -> None:
        self._state, self._loggers, self._console = state, loggers, console
        self._losses: list[Tensor] = []
        self.restart_clock()

    def restart_clock(self) -> None:
        """Measure the speed from here on: what came before was not training alone."""
        self._start, self._tokens_before = time.perf_counter(), self._state.tokens_read

    def add(self, loss: Tensor | None) -> None:
        """An update: its mean loss in nats per token, None if it was skipped."""
        if loss is not None:
            self._losses.append(loss)

    def record_training(self, statistics: Mapping[str, Tensor], show: Callable[..., None]) -> None:
        """Log the updates since the last record.

        Args:
            statistics: those of the last segment, see :class:`~memspan.models.output.Output`.
            show: see :func:`memspan.training.terminal.progress`.
        """
        state = self._state
        n_tokens = state.tokens_read - self._tokens_before
        speed = n_tokens / (time.perf_counter() - self._start)
        text, losses = state.prepared.splits["train"], {}
        short = "nan"
        if self._losses:
            nats = torch.stack(self._losses).mean().item()
            bits = None
            if not (state.unknown_share or text.altered):
                bits = nats / math.log(2) * len(text.tokens) / text.n_bytes
            losses = {"train_nats_per_token": nats, "train_bits_per_byte": bits}
            short = f"{nats:.3f}" if bits is None else f"{nats:.3f}  {bits:.3f} bits/byte"
        mean = {name: state.processes.mean(values) for name, values in statistics.items()}
        rate = learning_rate(state.step - 1, state.config.optim, state.steps)
        self._log(
            losses
            | dataclasses.asdict(state.health)
            | {"learning_rate": rate, "tokens_per_second": speed}
            | {f"train_{name}": value for name, value in by_layer(mean).items()}
        )
        show(completed=state.step, loss=short, speed=speed)
        self._losses = []
        self.restart_clock()

    def record_validation(self, scores: Scores, statistics: Mapping[str, Tensor]) -> None:
        """Log a validation, and print its score in one line."""
        record = {
            "validation_nats_per_token": scores.nats_per_token,
            "validation_bits_per_byte": scores.bits_per_byte,
        }
        if scores.n_unknown:
            record["validation_unknown_share"] = scores.unknown_share
        self._log(record | by_layer(statistics))
        nats = f"{scores.nats_per_token:.4f} nats per token"
        if scores.n_unknown:
            text = f"{nats} ({percent(scores.unknown_share)} unknown: no bits per byte)"
        elif scores.altered:
            text = nats
        else:
            text = f"{scores.bits_per_byte:.4f} bits per byte  ({nats})"
        self._console.print(f"step {self._state.step:>6,}  validation {text}")

    def _log(self, record: Record) -> None:
        for logger in self._loggers:
            logger.log(self._state.step, {"tokens": self._state.tokens_read, **record})

    def close(self) -> None:
        """Close the loggers."""
        for logger in self._loggers:
            logger.close()


def by_layer(statistics: Mapping[str, Tensor]) -> dict[str, float]:
    """``{"loss": [L]}`` as ``{"loss/layer_1": ..., ...}``."""
    return {
        f"{name}/layer_{n}": value
        for name, values in statistics.items()
        for n, value in enumerate(values.tolist(), 1)
    }
