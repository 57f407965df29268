"""A look inside a model after some history: memory as it is in the middle of a text."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from memspan.measurement.subject import RunSubject
from memspan.memory import Memory

ROWS = 4
"""Places of the text that are looked at together."""


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
