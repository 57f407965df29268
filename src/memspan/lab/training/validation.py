"""Validation of a run's weights: their score, statistics, and a sample of text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from memspan.lab.data.streams import evaluation_segments
from memspan.lab.data.tokenizers.base import StreamDecoder
from memspan.lab.distributed.processes import ALONE
from memspan.lab.evaluation import Scores, score_tokens
from memspan.lab.generation.drawing import AHEAD, draw_tokens
from memspan.lab.generation.writer import read_prompt
from memspan.lab.sampling import Sampling
from memspan.lab.training.state import TrainingState

PROMPT_TOKENS = 512
"""Maximum number of tokens that are read before a sample is written."""
MIN_P = 0.1
"""Sampling parameter: after minutes of training, less likely tokens are mostly misspellings."""
STATISTICS_SEGMENTS = 32
"""Segments that statistics read: the last of them, with memory filled by those before."""


class Validation:
    """Reads the validation split with a run's weights. If they are sharded, all processes call this."""

    def __init__(self, state: TrainingState) -> None:
        self.state = state
        # Scores choose the best weights, and must be comparable whatever type the run trains in.
        self.precision = dataclasses.replace(state.precision, products="float32")

    def text(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokens to score and, if the run resets memory at documents, where documents start."""
        config = self.state.config
        split = self.state.prepared.splits["validation"]
        tokens = split.tokens[: config.train.evaluate_tokens or None]
        return tokens, split.document_starts if config.data.document_reset else None

    def score(self, batch_size: int, *, emptied: bool = False) -> Scores:
        """Score the first ``evaluate_tokens`` tokens, from an empty memory, in ``batch_size`` streams.

        ``emptied``: with the memory emptied before every segment.

        Raises:
            NonFiniteError: a loss is NaN or infinite.
        """
        state = self.state
        tokens, document_starts = self.text()
        state.model.eval()
        batch_size = min(batch_size, len(tokens))
        segment_length = min(state.config.train.segment_length, len(tokens))
        return score_tokens(
            state.model,
            tokens,
            state.prepared.tokenizer,
            document_starts=document_starts,
            emptied=emptied,
            altered=state.prepared.splits["validation"].altered,
            batch_size=batch_size,
            segment_length=segment_length,
            precision=self.precision,
            processes=state.processes if batch_size % state.processes.size == 0 else ALONE,
        )

    def prompt(self) -> bytes:
        """The beginning of the text to score, up to the end of a paragraph, a line or a word."""
        text = self.state.prepared.tokenizer.decode(self.text()[0][:PROMPT_TOKENS])
        for end in (b"\n\n", b"\n", b" "):
            if (at := text.rfind(end, len(text) // 2)) >= 0:
                return text[: at + len(end)]
        return text

    def sample(self, n_tokens: int) -> str:
        """Text that the model writes after :meth:`prompt`, always with the same random numbers."""
        state = self.state
        state.model.eval()
        length = state.config.train.segment_length
        # With sharded parameters the reader does not take options.
        writing = {} if state.parallel.sharded else state.config.model.writing_options(length)
        reader = state.model.reader(batch_size=1, precision=self.precision, **writing)
        tokenizer = state.prepared.tokenizer
        decoder = StreamDecoder(tokenizer)
        logits, _ = read_prompt(reader, [tokenizer.encode(self.prompt())], length)
        drawn = draw_tokens(reader, logits, n_tokens, Sampling(min_p=MIN_P, seed=1), AHEAD)
        return "".join(decoder.push(ids[0]) for ids, _ in drawn)

    @torch.no_grad()
    def statistics(self) -> Mapping[str, Tensor]:
        """The architecture's statistics of one segment with memory before it, ``[L]`` each."""
        state = self.state
        options = self.state.config.train
        tokens, document_starts = self.text()
        state.model.eval()
        batch_size = min(options.batch_size, len(tokens))
        segment_length = min(options.segment_length, len(tokens))
        segments = evaluation_segments(tokens, batch_size, segment_length, document_starts)
        every_row = slice(0, batch_size)
        reader = state.model.reader(batch_size=batch_size, precision=self.precision)
        *before, last = [
            segment.part(every_row, state.device)
            for segment in islice(segments, STATISTICS_SEGMENTS)
        ]
        for segment in before:
            reader.read(segment.inputs, starts=segment.starts)
        with self.precision.applied(state.device):
            output = state.model(last.inputs, reader.memory, starts=last.starts)
        return output.statistics
