"""The subject of a measurement: a model, a text, the way it is read, and the time for it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from memspan.errors import NonFiniteError
from memspan.lab.data.streams import Segment, segment_at
from memspan.lab.data.tokenizers.base import Tokenizer
from memspan.memory import Memory
from memspan.models import LanguageModel, Reader
from memspan.nn import NOT_SCORED
from memspan.precision import Precision

Cuts = tuple[tuple[int, int], ...]
SEED = 1
"""Seed of every random choice, so that runs are measured on the same tokens."""
ROWS = 4
"""Places in the text at which a model is inspected together."""


class Budget:
    """A budget of CPU seconds of this process, over all threads, from now on."""

    def __init__(self, seconds: float, tell: Callable[[], None] = lambda: None) -> None:
        self._start = time.process_time()
        self._seconds = seconds
        self._tell = tell

    def spent(self) -> float:
        """Seconds since the start."""
        return time.process_time() - self._start

    def left(self) -> float:
        """Seconds left; negative if overspent. Reports the progress."""
        self._tell()
        return self._seconds - self.spent()

    def share(self, share: float) -> Budget:
        """A share of the remaining time, from now on."""
        return Budget(share * max(self.left(), 0.0), self._tell)


@dataclass(frozen=True, kw_only=True)
class Subject(ABC):
    """A text in a model's tokens, and how the model reads it."""

    tokenizer: Tokenizer
    tokens: np.ndarray
    """Integers, 1-D."""
    segment_length: int
    """Tokens per step, T."""
    document_starts: np.ndarray | None = None
    """Index of each document's first token if documents are read apart (None: they are not)."""
    window: int | None = None
    """Tokens that it can see: with more history, this many are read anew (None: any number)."""

    def segment(self, first: np.ndarray, n_tokens: int) -> Segment:
        """The targets from the positions ``first [B]`` on, ``n_tokens`` in each row, and their inputs.

        Unknown tokens are not targets: predicting one is not predicting the text behind it.
        """
        segment = segment_at(self.tokens, first, n_tokens, self.document_starts)
        if self.tokenizer.unknown is None:
            return segment
        unknown = segment.targets == self.tokenizer.unknown
        return replace(segment, targets=segment.targets.masked_fill(unknown, NOT_SCORED))

    def n_bytes(self, targets: Tensor) -> np.ndarray:
        """Bytes of the scored ``targets [B, T]`` of each row, float64 ``[B]``."""
        rows = targets.numpy()
        texts = [self.tokenizer.decode(row[row != NOT_SCORED]) for row in rows]
        return np.array([len(text) for text in texts], dtype=np.float64)

    @abstractmethod
    def losses(self, segment: Segment, cuts: Cuts, last: int) -> np.ndarray:
        """Nats of the ``last`` targets after an empty memory, float64 ``[B, last]``, 0 where one is not
        scored. ``cuts``: the parts that are read one after the other."""

    @abstractmethod
    def state_bytes(self, n_tokens: int) -> int:
        """Size of one row's state after this many tokens."""

    def cuts(self, n_tokens: int, line: int) -> Cuts:
        """``n_tokens`` inputs cut as the run reads, into ``(start, end)``. ``line``: index of an input
        that begins a segment, maybe outside; the others begin whole segments away from it."""
        inside = range(1 + (line - 1) % self.segment_length, n_tokens, self.segment_length)
        return tuple(pairwise([0, *inside, n_tokens]))


@dataclass(frozen=True, kw_only=True)
class RunSubject(Subject):
    """A model of memspan."""

    model: LanguageModel
    """The model, in evaluation mode."""
    precision: Precision | None = None
    """Precision of matrix products (None: as torch is set)."""

    def reader(self, batch_size: int, memory: Memory | None = None) -> Reader:
        """A reader at the start of a text, or after ``memory``."""
        return self.model.reader(memory, batch_size, precision=self.precision)

    def losses(self, segment: Segment, cuts: Cuts, last: int) -> np.ndarray:
        return self.read(segment, cuts, self.reader(len(segment.inputs)))[:, -last:]

    def state_bytes(self, n_tokens: int) -> int:
        return self.model.initial_memory(1).nbytes

    def read(self, segment: Segment, cuts: Cuts, reader: Reader) -> np.ndarray:
        """Read the next tokens; nats of every target, float64 ``[B, N]``, 0 where it is not scored."""
        found = []
        for start, end in cuts:
            part = slice(start, end)
            starts = None if segment.starts is None else segment.starts[:, part].to(reader.device)
            inputs, targets = (
                t[:, part].to(reader.device) for t in (segment.inputs, segment.targets)
            )
            found.append(reader.read(inputs, targets=targets, starts=starts))
        return finite(torch.cat(found, 1))


@torch.no_grad()
def after_history(
    subject: RunSubject, draws: np.random.Generator, history: int, n_tokens: int
) -> tuple[Tensor, Memory]:
    """Vectors ``[B, n_tokens, D]`` from random places, and the memory of ``history`` tokens before."""
    most = len(subject.tokens) - history - n_tokens
    first = 1 + draws.integers(max(1, most), size=ROWS)
    segment = subject.segment(first, history)
    reader = subject.reader(ROWS)
    subject.read(segment, subject.cuts(history, 0), reader)
    following = subject.segment(first + history, n_tokens)
    return subject.model.embedding(following.inputs.to(reader.device)), reader.memory


def finite(nats: Tensor) -> np.ndarray:
    """Losses as float64, all of them finite."""
    losses: np.ndarray = nats.cpu().double().numpy()
    if not np.isfinite(losses).all():
        raise NonFiniteError(
            "a loss is not finite: the weights or the memory have overflowed; use an earlier "
            "checkpoint, or lower the learning rate in training"
        )
    return losses
