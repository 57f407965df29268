"""Scoring a text: every token once, memory carried from its start to its end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from memspan.calls import checked
from memspan.errors import MemspanError, NonFiniteError, counted
from memspan.files.disk import path_of
from memspan.lab.data.streams import Segment, evaluation_segments
from memspan.lab.data.tokenizers.base import Tokenizer
from memspan.lab.distributed.processes import ALONE, Processes
from memspan.lab.modes import usual_modes
from memspan.lab.runs.run import Run, opened, options_of, precision_for, segment_for
from memspan.lab.runs.texts import text_of
from memspan.memory import Memory
from memspan.models.language_model import LanguageModel, Reader
from memspan.native.waiting import sharing_cores
from memspan.nn import NOT_SCORED
from memspan.precision import Precision

Losses = Callable[[Segment, Tensor], None]
"""Takes a segment and its losses ``[B, T]``."""


@dataclass(frozen=True)
class Scores:
    """Scores of a model on a text."""

    nats: float
    """Sum of the scored tokens' losses."""
    tokens: int
    """Number of scored tokens."""
    n_unknown: int
    """Scored tokens that stand for words or characters outside the vocabulary, such as ``<unk>``."""
    n_bytes: int
    """Bytes of the scored text, decoded from its tokens."""
    n_characters: int
    """Characters of the same text."""
    n_words: int
    """Words of the same text, separated by white space."""
    altered: bool
    """True if decoding the tokens does not restore the text: its case, spaces or rare characters are
    lost."""
    streams: int
    """1: the exact protocol. More: the text was cut into this many streams, each with empty memory."""
    segment_length: int
    """Tokens per step, T."""
    memory: dict[str, object]
    """Memory sizes that were changed for this evaluation."""
    reading: dict[str, object]
    """Other options of the architecture that were changed for it, such as the attention span."""
    seconds: float
    """Duration of the scoring."""

    @property
    def nats_per_token(self) -> float:
        """Mean loss."""
        return self.nats / self.tokens

    @property
    def unknown_share(self) -> float:
        """Unknown tokens as a share of the scored ones, in [0, 1]."""
        return self.n_unknown / self.tokens

    @property
    def bits_per_byte(self) -> float | None:
        """None if any token is unknown, or the tokeniser alters the text: the model need not predict
        what is lost, so the number would flatter it beside a model that predicts the complete text."""
        return self._bits_per(self.n_bytes)

    @property
    def bits_per_character(self) -> float | None:
        """None if any token is unknown, for the same reason."""
        return self._bits_per(self.n_characters)

    @property
    def perplexity(self) -> float:
        """Perplexity per token."""
        return _exp(self.nats_per_token)

    @property
    def word_perplexity(self) -> float | None:
        """Perplexity per word, counted as ``n_words``; None if the tokeniser alters the text."""
        return None if self.altered else _exp(self.nats / max(self.n_words, 1))

    @property
    def tokens_per_second(self) -> float:
        """Speed of the scoring."""
        return self.tokens / self.seconds

    def _bits_per(self, n: int) -> float | None:
        return None if self.n_unknown or self.altered else self.nats / math.log(2) / max(n, 1)

    def as_dict(self) -> dict[str, object]:
        """All fields and scores, plain JSON values."""
        scores = [name for name, each in vars(Scores).items() if isinstance(each, property)]
        return asdict(self) | {name: getattr(self, name) for name in scores}


@dataclass(frozen=True)
class Evaluation(Scores):
    """The scores of a run on a text, and how it was read."""

    run: str
    """The run's folder."""
    corpus: str
    """Name or path of the text."""
    split: str
    """The part of it that was scored."""
    tokens_before: int
    """Tokens that the initial memory had read; 0: it was empty."""
    as_in_training: bool | None
    """True if the run was trained on this text (None: a converted run has none)."""
    precision: Literal["float32", "bfloat16"]
    """Precision of matrix products."""
    matmul_precision: Literal["highest", "high", "medium"]
    """The precision inside products of float32."""


@checked
@sharing_cores()
@usual_modes()
def evaluate(
    run: Run | str | Path,
    corpus: str | Path | None = None,
    *,
    field: str | None = None,
    split: str = "validation",
    tokens: int = 0,
    batch_size: int = 1,
    segment_length: int | None = None,
    memory: Memory | str | Path | None = None,
    per_token: str | Path | None = None,
    precision: Precision | None = None,
    progress: Callable[[int, int], None] | None = None,
    **options: object,
) -> Evaluation:
    """Score a text with a trained model, as ``memspan evaluate`` does.

    Anything to know besides the score, such as that the text has changed since training, is logged as
    a warning of the logger ``memspan``.

    Args:
        run: the run, or its folder.
        corpus: a named corpus, file, folder or glob (None: the run's own).
        field: the field or column with the corpus's text, in JSON Lines, CSV, Parquet and data sets
            (None: as in training).
        split: ``train``, ``validation``, ``test``, or ``all``: the whole text, in order.
        tokens: score only the first N tokens (0: all).
        batch_size: parallel streams. 1 is the exact protocol; more are faster but cut the text.
        segment_length: tokens per step, T (None: as in training, or fewer if the positions of the
            model do not reach over a longer memory).
        memory: what was read before, one row, or a file that holds it (None: nothing). The first
            token's input is always that of a text's start, since a memory does not hold the last
            prediction.
        per_token: a new file for each token's loss, in JSON Lines: its ``position`` in the split, the
            ``token``'s id, and ``nats``; with one stream in the order of the text.
        precision: of matrix products (None: float32, multiplied as in training).
        progress: called with the numbers of tokens scored so far and in all (None: nothing is shown).
        options: the architecture's own, such as ``memory_length=1024`` or
            ``attention_span="fixed"`` (left out: as in training).

    Raises:
        MemspanError: there is no such run, text, split or option; ``per_token`` exists.
        NonFiniteError: a loss is NaN or infinite.

    Example::

        scores = memspan.evaluate("runs/book", "other-book.txt", split="all", memory_length=512)
        print(scores.bits_per_byte)
    """
    if tokens < 0:
        raise MemspanError(f"tokens must be at least 0, not {tokens}")
    run = opened(run)
    sizes, reading = options_of(run, options, signature(evaluate).parameters)
    precision = precision or precision_for(run)
    if memory is not None:
        memory = _before(run, memory, batch_size, sizes)
    corpus = None if corpus is None else str(corpus)
    text = text_of(run, corpus, field, split, progress is not None)
    ids = text.tokens[: tokens or None]
    if segment_length is None:
        per_stream = len(ids) // max(batch_size, 1)
        segment_length = min(segment_for(run, memory, sizes, reading), max(per_stream, 1))
    rows = np.arange(batch_size) * -(-len(ids) // max(batch_size, 1))
    scores = score_tokens(
        run.model,
        ids,
        run.tokenizer,
        document_starts=text.document_starts,
        altered=text.altered,
        batch_size=batch_size,
        segment_length=segment_length,
        memory=sizes,
        before=memory,
        reading=reading,
        precision=precision,
        each=None if per_token is None else _writing(path_of(per_token), rows),
        progress=progress and (lambda n: progress(n, len(ids))),
    )
    return Evaluation(
        **vars(scores),
        run=str(run.folder),
        corpus=text.corpus,
        split=split,
        tokens_before=int(memory.tokens_seen[0]) if isinstance(memory, Memory) else 0,
        as_in_training=text.as_in_training,
        precision=precision.products,
        matmul_precision=precision.matmul,
    )


def _before(
    run: Run, memory: Memory | str | Path, batch_size: int, sizes: dict[str, object]
) -> Memory:
    """Load the memory to start from, and check that it fits the way the text is read."""
    if sizes:
        raise MemspanError(f"a memory has its own sizes: drop {', '.join(sizes)}, or the memory")
    if run.config.data.document_reset:
        raise MemspanError(
            f"{run.folder} reads each document by itself (document_reset): memory has no effect"
        )
    if not isinstance(memory, Memory):
        memory = run.model.load_memory(memory)
    if memory.batch_size != 1 or batch_size != 1:
        raise MemspanError(
            f"a memory of {counted(memory.batch_size, 'row')} cannot begin "
            f"{counted(batch_size, 'stream')}: take a batch size of 1 and a memory of one row, "
            "as memory.select([0])"
        )
    return memory


def _writing(path: Path, rows: np.ndarray) -> Losses:
    """Write each token's loss to a new file, in JSON Lines; streams begin at ``rows [B]``."""
    if path.exists():
        raise MemspanError(f"{path} exists: give --per-token another path")
    if not path.parent.is_dir():
        raise MemspanError(f"there is no folder {path.parent}: check --per-token")
    first = torch.from_numpy(rows)[:, None]

    def each(segment: Segment, losses: Tensor) -> None:
        nonlocal first
        positions = first + torch.arange(losses.shape[1])
        first = positions[:, -1:] + 1
        scored = (segment.targets != NOT_SCORED).cpu()
        columns = (t.cpu()[scored].tolist() for t in (positions, segment.targets, losses))
        with path.open("a", encoding="utf-8") as file:
            for n, token, nats in zip(*columns, strict=True):
                print(f'{{"position": {n}, "token": {token}, "nats": {nats:.6g}}}', file=file)

    return each


def score_tokens(
    model: LanguageModel,
    tokens: np.ndarray,
    tokenizer: Tokenizer,
    *,
    document_starts: np.ndarray | None = None,
    altered: bool = False,
    batch_size: int = 1,
    segment_length: int = 128,
    memory: dict[str, Any] | None = None,
    emptied: bool = False,
    before: Memory | None = None,
    reading: dict[str, Any] | None = None,
    precision: Precision | None = None,
    each: Losses | None = None,
    progress: Callable[[int], None] | None = None,
    processes: Processes = ALONE,
) -> Scores:
    """Score ``tokens``, integers, 1-D; arguments of :func:`evaluate` mean the same here.

    Args:
        model: in evaluation mode.
        tokens: the text.
        tokenizer: the one that made the tokens, to decode them for bytes, characters and words.
        document_starts: the index of each document's first token; nothing before it is visible to
            the tokens of that document (None: memory is carried across documents).
        altered: true if decoding the tokens does not restore the text.
        memory: options of the model's ``initial_memory`` (None: as in training).
        emptied: empty the memory before every segment; a segment's first input stays what it is.
        before: the memory of what was read before, a row per stream (None: empty).
        reading: options of the model's ``reader`` (None: as in training).
        each: called with this process's rows of every segment and their losses.
        progress: called with the number of tokens scored so far.
        processes: processes that share the streams; each returns the score of all streams.
    """
    memory = memory or {}
    reading = reading or {}
    rows = processes.rows(batch_size)
    # Sizes that the text does not allow are refused before memory is made for them.
    segments = evaluation_segments(tokens, batch_size, segment_length, document_starts)
    if before is None:
        before = model.initial_memory(rows.stop - rows.start, **memory)
    reader = model.reader(before, precision=precision, **reading)
    start = time.perf_counter()
    if emptied:
        segments = map(_emptied, segments)
    nats, scored = _read_all(reader, segments, rows, each, progress, processes)
    text = tokenizer.decode(tokens)
    decoded = text.decode("utf-8", errors="replace")
    return Scores(
        nats=processes.total(nats),
        tokens=scored,
        n_unknown=tokenizer.count_unknown(tokens),
        n_bytes=len(text),
        n_characters=len(decoded),
        n_words=len(decoded.split()),
        altered=altered,
        streams=batch_size,
        segment_length=segment_length,
        memory=memory,
        reading=reading,
        seconds=time.perf_counter() - start,
    )


def _emptied(segment: Segment) -> Segment:
    starts = torch.zeros_like(segment.inputs, dtype=torch.bool)
    starts[:, 0] = True
    return replace(segment, starts=starts if segment.starts is None else starts | segment.starts)


def _read_all(
    reader: Reader,
    segments: Iterable[Segment],
    rows: slice,
    each: Losses | None,
    progress: Callable[[int], None] | None,
    processes: Processes,
) -> tuple[float, int]:
    """Read the whole text; returns the nats of this process's ``rows`` and the scored tokens of all."""
    nats = 0.0
    scored = 0
    refused: NonFiniteError | None = None
    try:
        for segment in segments:
            own = segment.part(rows, reader.device)
            losses = reader.read(own.inputs, targets=own.targets, starts=own.starts)
            nats += sum_of(losses, own.targets).item()
            # Processes that share the model must make the same calls: none may leave early.
            if processes.size == 1 and not math.isfinite(nats):
                break
            if each is not None:
                each(own, losses)
            scored += int((segment.targets != NOT_SCORED).sum())
            if progress is not None:
                progress(scored)
    except NonFiniteError as error:
        refused = error
    if processes.any(refused is not None or not math.isfinite(nats)):
        raise refused or NonFiniteError(
            f"the score is not finite after {counted(scored, 'token')}: the weights or the memory "
            "have overflowed; use an earlier checkpoint, or lower the learning rate in training"
        )
    return nats, scored


def sum_of(losses: Tensor, targets: Tensor) -> Tensor:
    """The sum of ``losses [B, T]`` over scored ``targets [B, T]``, a scalar on the CPU.

    In float64, since a float32 sum over millions of tokens loses digits. Not every device has float64.
    """
    return losses[targets != NOT_SCORED].cpu().sum(dtype=torch.float64)


def percent(share: float) -> str:
    """Three significant digits: 0.0123 is 1.23%."""
    return f"{100 * share:.3g}%"


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
