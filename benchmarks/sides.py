"""A side of a comparison: a model trained from a run's options, without a run folder, and scored."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memspan.lab.data.prepared import prepare
from memspan.lab.data.tokenizers.plain import ByteTokenizer
from memspan.lab.evaluation import score_tokens
from memspan.lab.runs.options import RunConfig
from memspan.lab.training.state import TrainingState
from memspan.lab.training.updates import Updater
from memspan.models import LanguageModel


class Side:
    """A run's options in training, on bytes and on the CPU.

    ``corpus``: a file or a named corpus. ``emptied``: its memory is emptied before every segment, in
    training and scoring.
    """

    def __init__(
        self, config: RunConfig[Any], corpus: str | Path, *, emptied: bool = False
    ) -> None:
        self.emptied = emptied
        self.prepared = prepare(str(corpus), "bytes")
        self.state = TrainingState(config, self.prepared, torch.device("cpu"))
        self.updater = Updater(self.state)

    @property
    def step(self) -> int:
        """Updates so far."""
        return self.state.step

    @property
    def n_parameters(self) -> int:
        return sum(p.numel() for p in self.state.model.parameters())

    def update(self) -> None:
        if self.emptied:
            self.state.memory = self.state.model.initial_memory(self.state.config.train.batch_size)
        self.updater.update()

    def train(self, steps: int) -> float:
        """So many updates; the CPU seconds that they took."""
        start = time.process_time()
        for _ in range(steps):
            self.update()
        return time.process_time() - start

    def score(self, text: np.ndarray, streams: int = 1, **memory: int) -> float:
        """Nats per byte of ``text``. One stream is the exact protocol.

        ``memory``: its sizes, where they differ from training's, such as ``memory_length=128``.
        """
        length = self.state.config.train.segment_length
        return score_tokens(
            self.state.model.eval(),
            text,
            ByteTokenizer(),
            document_starts=np.arange(0, len(text), length) if self.emptied else None,
            batch_size=streams,
            segment_length=length,
            memory=memory,
        ).nats_per_token


def its_own(kind: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Select the options that a config has: an LSTM has no heads."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in options.items() if name in names}


def n_parameters(config: RunConfig[Any]) -> int:
    """Count parameters of the model that a run's options make, for bytes."""
    model = LanguageModel(ByteTokenizer().vocab_size, config.model, config.embedding)
    return sum(p.numel() for p in model.parameters())


def shortened(config: RunConfig[Any], steps: int, seed: int) -> RunConfig[Any]:
    """The options for another number of steps and seed; a curriculum keeps its share of the steps."""
    loop = config.train
    curriculum = round(loop.curriculum_steps * steps / loop.steps)
    loop = dataclasses.replace(loop, steps=steps, seed=seed, curriculum_steps=curriculum)
    return dataclasses.replace(config, train=loop)
