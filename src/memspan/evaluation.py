"""Scoring a text: every token once, memory carried from start to end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memspan.data.streams import evaluation_segments
from memspan.data.tokenizers import Tokenizer
from memspan.distributed.processes import ALONE, Processes
from memspan.errors import NonFiniteError
from memspan.models import LanguageModel
from memspan.nn import NOT_SCORED
from memspan.precision.products import Precision


@dataclass(frozen=True)
class Scores:
    """The result of one evaluation."""

    nats: float
    """Sum over the scored tokens."""
    tokens: int
    n_unknown: int
    """Scored tokens that stand for what the vocabulary lacks, such as ``<unk>``."""
    n_bytes: int
    """Bytes of the scored text, as decoded from its tokens; likewise characters and words."""
    n_characters: int
    n_words: int
    streams: int
    """1: the exact protocol. More: the text was cut into that many streams, each starting empty."""
    segment_length: int
    memory: dict[str, int]
    """Sizes of the memory where they were changed for this evaluation."""
    reading: dict[str, Any]
    """Attention span and clamp where they were changed for this evaluation."""
    seconds: float

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens

    @property
    def unknown_share(self) -> float:
        """Of the scored tokens, in [0, 1]."""
        return self.n_unknown / self.tokens

    @property
    def bits_per_byte(self) -> float | None:
        """None where tokens are unknown: the model was not asked which bytes they stand for, so the
        number would look better than that of a model which predicts all of the text."""
        return self._bits_per(self.n_bytes)

    @property
    def bits_per_character(self) -> float | None:
        """None in the same case."""
        return self._bits_per(self.n_characters)

    @property
    def perplexity(self) -> float:
        """Per token."""
        return _exp(self.nats_per_token)

    @property
    def word_perplexity(self) -> float:
        """Per white-space separated word."""
        return _exp(self.nats / max(self.n_words, 1))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def _bits_per(self, n: int) -> float | None:
        return None if self.n_unknown else self.nats / math.log(2) / max(n, 1)

    def as_dict(self) -> dict[str, Any]:
        names = (
            "nats_per_token",
            "unknown_share",
            "bits_per_byte",
            "bits_per_character",
            "perplexity",
            "word_perplexity",
            "tokens_per_second",
        )
        return asdict(self) | {name: getattr(self, name) for name in names}


def score_tokens(
    model: LanguageModel,
    tokens: np.ndarray,
    tokenizer: Tokenizer,
    *,
    document_starts: np.ndarray | None = None,
    batch_size: int = 1,
    segment_length: int = 128,
    memory: dict[str, int] | None = None,
    reading: dict[str, Any] | None = None,
    precision: Precision | None = None,
    progress: Callable[[int], None] = lambda scored: None,
    processes: Processes = ALONE,
) -> Scores:
    """Score ``tokens`` (1-D).

    Args:
        model: in evaluation mode.
        tokenizer: the one that made the tokens; it says which text they stand for.
        document_starts: the index of each document's first token; nothing before it is visible to
            its tokens (None: the text is read on across its documents).
        batch_size: parallel streams; 1 is the exact protocol.
        segment_length: tokens per step, T.
        memory: options of the model's ``initial_memory``, such as ``{"memory_length": 128}`` (None: as
            in training).
        reading: options of the model's ``reader``, such as ``{"attention_span": "fixed",
            "clamp_length": 400}`` (None: as in training).
        precision: of products while it scores (None: as torch is set).
        progress: called with the number of tokens scored so far.
        processes: those that share the streams; each returns the whole score.

    Raises:
        NonFiniteError: a loss is NaN or infinite.
    """
    device = next(model.parameters()).device
    memory, reading = memory or {}, reading or {}
    rows = processes.rows(batch_size)
    # Refuses sizes that the text does not have before memory is made for them.
    segments = evaluation_segments(tokens, batch_size, segment_length, document_starts)
    empty = model.initial_memory(rows.stop - rows.start, **memory)
    reader = model.reader(empty, precision=precision, **reading)
    nats, scored, start = 0.0, 0, time.perf_counter()
    overflow: NonFiniteError | None = None
    try:
        for segment in segments:
            here = segment.part(rows, device)
            losses = reader.read(here.inputs, targets=here.targets, starts=here.starts)
            nats += sum_of(losses, here.targets).item()
            if overflow is None and not math.isfinite(nats):
                overflow = _overflow(scored // batch_size)
                # Where processes share the model, none may leave before the others.
                if processes.size == 1:
                    break
            scored += int((segment.targets != NOT_SCORED).sum())
            progress(scored)
    except NonFiniteError as error:
        overflow = error
    if processes.any(overflow is not None):
        raise overflow or _overflow(scored // batch_size)
    text = tokenizer.decode(tokens)
    decoded = text.decode("utf-8", errors="replace")
    return Scores(
        nats=processes.total(nats),
        tokens=scored,
        n_unknown=tokenizer.count_unknown(tokens),
        n_bytes=len(text),
        n_characters=len(decoded),
        n_words=len(decoded.split()),
        streams=batch_size,
        segment_length=segment_length,
        memory=memory,
        reading=reading,
        seconds=time.perf_counter() - start,
    )


def sum_of(losses: Tensor, targets: Tensor) -> Tensor:
    """The sum of ``losses [B, T]`` over scored ``targets [B, T]``, a scalar on the CPU.

    In float64: a float32 sum over millions of tokens would lose digits. Not every device has it.
    """
    scored = losses[targets != NOT_SCORED]
    return scored.cpu().sum(dtype=torch.float64)


def percent(share: float) -> str:
    """Three digits, also of a small share: 0.0123 is 1.23%."""
    return f"{100 * share:.3g}%"


def _overflow(n_tokens: int) -> NonFiniteError:
    return NonFiniteError(
        f"the score is not finite after {n_tokens:,} tokens of each stream: the weights or the "
        "memory have overflowed; use an earlier checkpoint, or lower the learning rate in training"
    )


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
