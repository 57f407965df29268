"""How good a run's weights are: their score, statistics, and a sample of text; what is said of them at
the end."""

from __future__ import annotations

import dataclasses
import lzma
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from memspan.data.streams import evaluation_segments
from memspan.distributed.processes import ALONE
from memspan.errors import MemspanError, counted
from memspan.evaluation import Scores, percent, score_tokens
from memspan.generation.drawing import draw_tokens
from memspan.generation.writer import read_prompt
from memspan.invocation import command
from memspan.memory import Memory
from memspan.models.language_model import LanguageModel
from memspan.sampling import Sampling
from memspan.training import metrics
from memspan.training.state import Health, TrainingState

PROMPT_TOKENS = 512
"""Maximum number of tokens that are read before a sample is written."""
MIN_P = 0.1
"""Sampling parameters: after minutes of training, less likely tokens are mostly misspellings."""
STATISTICS_SEGMENTS = 32
"""Segments that statistics read: the last of them, with memory filled by those before."""

PROMPT_LINES = 3
PROMPT_WIDTH = 100
"""How much of a sample's prompt is shown: lines, and characters of each."""
LEAST_WORTH = 0.002
"""The smallest saving by memory that is reported, as a share of the loss: less may be chance."""


class Validation:
    """Reads the validation split with a run's weights. If they are sharded, all processes call this."""

    def __init__(self, state: TrainingState) -> None:
        self.state = state
        # Whatever the run trains in: scores must be comparable, and they choose the best weights.
        self.precision = dataclasses.replace(state.precision, products="float32")

    def text(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokens to score and, if the run resets memory at documents, where documents start."""
        config, split = self.state.config, self.state.prepared.splits["validation"]
        tokens = split.tokens[: config.train.evaluate_tokens or None]
        return tokens, split.document_starts if config.data.document_reset else None

    def score(self, batch_size: int, *, emptied: bool = False) -> Scores:
        """Score the first ``evaluate_tokens`` tokens, from an empty memory, in ``batch_size`` streams.

        ``emptied``: as if a document began with every segment of one stream.

        Raises:
            NonFiniteError: a loss is NaN or infinite.
        """
        state = self.state
        tokens, document_starts = self.text()
        state.model.eval()
        batch_size = min(batch_size, len(tokens))
        segment_length = min(state.config.train.segment_length, len(tokens))
        if emptied:
            firsts = np.arange(0, len(tokens), segment_length)
            document_starts = (
                firsts if document_starts is None else np.union1d(firsts, document_starts)
            )
        return score_tokens(
            state.parallel.scored,
            tokens,
            state.prepared.tokenizer,
            document_starts=document_starts,
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
        scored, options = state.parallel.scored, state.config.train
        # With sharded parameters the reader does not take options.
        writing: dict[str, Any] = {}
        if isinstance(scored, LanguageModel):
            writing = state.config.model.writing_options(options.segment_length)
        reader = scored.reader(batch_size=1, precision=self.precision, **writing)
        tokenizer = state.prepared.tokenizer
        decoder = tokenizer.stream_decoder()
        logits, _ = read_prompt(reader, [tokenizer.encode(self.prompt())], options.segment_length)
        drawn = draw_tokens(reader, logits, n_tokens, Sampling(min_p=MIN_P, seed=1))
        return "".join(decoder.push(ids[0]) for ids, _ in drawn)

    @torch.no_grad()
    def statistics(self) -> Mapping[str, Tensor]:
        """What the architecture reports about one segment with memory before it, ``[L]`` each."""
        state, options = self.state, self.state.config.train
        tokens, document_starts = self.text()
        state.model.eval()
        batch_size = min(options.batch_size, len(tokens))
        segment_length = min(options.segment_length, len(tokens))
        segments = evaluation_segments(tokens, batch_size, segment_length, document_starts)
        scored, every_row = state.parallel.scored, slice(0, batch_size)
        reader = scored.reader(batch_size=batch_size, precision=self.precision)
        *before, last = [
            segment.part(every_row, state.device)
            for segment in islice(segments, STATISTICS_SEGMENTS)
        ]
        for segment in before:
            reader.read(segment.inputs, starts=segment.starts)
        with self.precision.applied(state.device):
            output = scored(last.inputs, reader.memory, starts=last.starts)
        return output.statistics


def conclude(console: Console, state: TrainingState, folder: Path) -> None:
    """Say what was written, how the model goes on after held-out text, its scores, and what is next."""
    say, validation = console.print, Validation(state)
    if state.health != Health():
        say(f"{state.health}", highlight=False)
    say("\nwritten:", style="bold")
    say(f"  run folder  {folder}\n  metrics     {folder / 'metrics.jsonl'}")
    try:
        for picture in metrics.plot(folder, state.config.model.plots):
            say(f"  picture     {picture}")
    except MemspanError as error:
        # Everything that matters is saved.
        say(f"  no picture: {error}")
    tokens, _ = validation.text()
    text = state.prepared.tokenizer.decode(tokens)
    if n_tokens := state.config.train.sample_tokens:
        sample = validation.sample(n_tokens)
        say("\nit has read the beginning of the held-out text, which ends:", style="bold")
        # Of a long line, its end.
        prompt = validation.prompt().decode(errors="replace").rstrip("\n")
        for line in prompt.splitlines()[-PROMPT_LINES:]:
            say(f"  | {line[-PROMPT_WIDTH:]}", markup=False, highlight=False)
        say("and writes on:", style="bold")
        say(sample.strip("\n"), markup=False, highlight=False)
    _show_score(console, state, validation, text)
    words = prompt_from(text)
    begun = ["--prompt", words, "--min-p", MIN_P] if words else []
    say("\nnext:", style="bold")
    # Commands are copied: no line breaks or colours inside.
    for arguments in (["generate", folder, *begun], ["evaluate", folder], ["measure", folder]):
        say(f"  {command(*arguments)}", highlight=False)


def _show_score(
    console: Console, state: TrainingState, validation: Validation, text: bytes
) -> None:
    """The model's score, with and without memory, and a compressor's."""
    config, say = state.config, console.print
    scores = validation.score(1)
    n_tokens = config.train.evaluate_tokens
    whole = not 0 < n_tokens < len(state.prepared.splits["validation"].tokens)
    part = "the validation split" if whole else "the validation split's first part"
    apart = ", every document by itself" if config.data.document_reset else ""
    rows = {"memory carried": _in_words(scores)}
    if state.model.backbone.memory_type is not Memory:
        without = validation.score(1, emptied=True)
        rows[f"memory emptied every {counted(scores.segment_length, 'token')}"] = _in_words(without)
        saved = 1 - scores.nats / without.nats
        worth = f"memory saves {saved:.1%}" if saved >= LEAST_WORTH else "memory is not used yet"
    else:
        worth = "this architecture has no memory"
    if scores.bits_per_byte is not None:
        rows["lzma, a compressor"] = f"{_compressed(text):.3f} bits per byte"
    say(f"\nscore on {part}, {counted(scores.tokens, 'token')} in one stream{apart}:")
    for what, score in rows.items():
        say(f"  {what:<{max(map(len, rows))}}   {score}", highlight=False)
    say(f"Lower is better: {worth}.")
    if scores.n_unknown:
        say(
            f"{percent(scores.unknown_share)} of the tokens are unknown and their text is not "
            "scored: bits per byte are unknown, and the model cannot be compared with lzma, a "
            "compressor."
        )


def _in_words(scores: Scores) -> str:
    perplexity = f"perplexity per token {scores.perplexity:.2f}"
    if scores.bits_per_byte is None:
        return perplexity
    return f"{scores.bits_per_byte:.3f} bits per byte   ({perplexity})"


def _compressed(text: bytes) -> float:
    """Bits per byte of ``text`` as lzma packs it, without a file's header."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
    return 8 * len(lzma.compress(text, lzma.FORMAT_RAW, filters=filters)) / len(text)


def prompt_from(text: bytes) -> str:
    """A prompt from the first words of ``text``; empty if it has no plain ones."""
    for line in text[:4096].decode(errors="replace").splitlines():
        words = re.match(r"\w[\w ,.:;'()-]{2,23}(?!\w)", line.strip())
        if words and "\N{REPLACEMENT CHARACTER}" not in words[0]:
            return words[0].strip()
    return ""
