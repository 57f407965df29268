"""What is measured: a model, the text that it reads, and how it reads it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from memspan.data.streams import Segment, segment_at
from memspan.data.tokenizers.base import Tokenizer
from memspan.errors import NonFiniteError
from memspan.memory import Memory
from memspan.models import LanguageModel, Reader
from memspan.nn import NOT_SCORED
from memspan.precision.products import Precision

Cuts = tuple[tuple[int, int], ...]
SEED = 1
"""Of every random choice, so that runs are measured on the same tokens."""


@dataclass(frozen=True)
class Subject:
    """A trained model and a text in its tokens."""

    model: LanguageModel
    """In evaluation mode."""
    tokenizer: Tokenizer
    tokens: np.ndarray
    """Integers, 1-D."""
    segment_length: int
    """Tokens per step, T, as the run reads."""
    document_starts: np.ndarray | None = None
    """Index of each document's first token, where documents are read apart (None: they are not)."""
    precision: Precision | None = None
    """Of matrix products (None: as torch is set)."""

    def segment(self, first: np.ndarray, n_tokens: int) -> Segment:
        """The targets from the positions ``first [B]`` on, ``n_tokens`` in each row, and their inputs.

        Unknown tokens are no targets: who predicts them has not predicted the text behind them.
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

    def reader(self, batch_size: int, memory: Memory | None = None) -> Reader:
        """At the start of a text, or after ``memory``."""
        return self.model.reader(memory, batch_size, precision=self.precision)

    def losses(self, segment: Segment, cuts: Cuts, reader: Reader | None = None) -> np.ndarray:
        """Nats of every target, float64 ``[B, N]``, 0 where it is not scored.

        Args:
            segment: of any length.
            cuts: the parts that are read one after the other, from :meth:`cuts`.
            reader: reads on (None: from an empty memory).
        """
        reader = reader or self.reader(len(segment.inputs))
        device = reader.device
        found = []
        for start, end in cuts:
            part = slice(start, end)
            starts = None if segment.starts is None else segment.starts[:, part].to(device)
            inputs, targets = segment.inputs[:, part], segment.targets[:, part]
            nats = reader.read(inputs.to(device), targets=targets.to(device), starts=starts)
            found.append(nats.cpu().double())
        losses = torch.cat(found, 1).numpy()
        if not np.isfinite(losses).all():
            raise NonFiniteError(
                "a loss is not finite: the weights or the memory have overflowed; use an earlier "
                "checkpoint, or lower the learning rate in training"
            )
        return losses

    def cuts(self, n_tokens: int, line: int) -> Cuts:
        """``n_tokens`` inputs cut as the run reads, into ``(start, end)``.

        Args:
            line: index of an input with which a segment begins; the others begin whole segments away
                from it. It need not lie inside.
        """
        inside = range(1 + (line - 1) % self.segment_length, n_tokens, self.segment_length)
        return tuple(pairwise([0, *inside, n_tokens]))
