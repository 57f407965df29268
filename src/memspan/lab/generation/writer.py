"""Continuing texts token by token, in constant memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from memspan.calls import checked
from memspan.errors import MemspanError, counted
from memspan.lab.data.tokenizers.base import StreamDecoder, Tokenizer, bytes_of
from memspan.lab.generation.drawing import AHEAD, draw_tokens
from memspan.lab.modes import usual_modes
from memspan.lab.runs.run import Run, opened, options_of, precision_for, segment_for
from memspan.lab.sampling import DEFAULT, Sampling
from memspan.memory import Memory, concatenate
from memspan.models.language_model import Reader
from memspan.models.sizes import refuse_oversized
from memspan.native.waiting import sharing_cores
from memspan.precision import Precision

SHOWN = 3
"""Unknown parts of a prompt that a warning names."""
Prompt = str | Iterable[bytes]
"""A text, or the pieces of a long one."""


@dataclass(frozen=True)
class Generation:
    """A model's continuations: all samples of the first prompt, then those of the next."""

    texts: list[str]
    """The samples, without the prompt, and without a stop string that ended them."""
    memory: Memory
    """The memory of all that was read and written, one row per sample. ``memory[0]`` is the first
    sample's."""
    tokens: list[list[int]]
    """The samples' ids, with those of a stop string."""
    log_probabilities: list[list[float]] | None = None
    """Log-probabilities of the same ids in nats, before temperature and filters (None: not asked
    for)."""

    @property
    def text(self) -> str:
        """The first sample."""
        return self.texts[0]


@checked
@sharing_cores()
@usual_modes()
def generate(
    run: Run | str | Path,
    prompt: str | Iterable[bytes] | Sequence[str] = "",
    *,
    tokens: int = 400,
    samples: int = 1,
    sampling: Sampling = DEFAULT,
    memory: Memory | str | Path | None = None,
    stop: str | Sequence[str] = (),
    log_probabilities: bool = False,
    precision: Precision | None = None,
    cuda_graph: bool = False,
    **options: object,
) -> Generation:
    """Continue texts, as ``memspan generate`` does. :class:`Writer` yields them while they are written.

    Args:
        run: the run, or its folder.
        prompt: the text to continue, or the pieces of a long one, or a list of texts, which are
            continued side by side, each as it would be alone (empty: a line break or, if the
            vocabulary has none, its first token).
        tokens: tokens to write per sample (0: only read the prompt).
        samples: continuations of each prompt, written side by side.
        sampling: how tokens are drawn. With a seed, what a sample draws depends on how many there are.
        memory: what was read before, one row or one per prompt, or a file that holds it (None:
            nothing).
        stop: a sample ends where its text has one of these strings, which is left out of it.
        log_probabilities: return those of the tokens written.
        precision: of matrix products (None: float32, multiplied as in training).
        cuda_graph: launch each token's pass as one CUDA graph.
        options: the architecture's own, such as ``attention_span="fixed"`` (left out: as in training).

    Raises:
        MemspanError: there is no such run or option, or the memory is another model's or has another
            number of rows.
        NonFiniteError: the model's logits are NaN or infinite.

    Example::

        book = memspan.generate("runs/book", "Once upon a time", tokens=100)
        print(book.text)
        more = memspan.generate("runs/book", " and then", memory=book.memory)
        both = memspan.generate("runs/book", ["The king", "The queen"], stop="\\n")
    """
    writer = Writer(
        run,
        prompt,
        tokens=tokens,
        samples=samples,
        sampling=sampling,
        memory=memory,
        stop=stop,
        log_probabilities=log_probabilities,
        precision=precision,
        cuda_graph=cuda_graph,
        **options,
    )
    if not stop:
        # Nobody sees the memory in between.
        writer._ahead = AHEAD
    for _ in writer:
        pass
    return Generation(writer.texts, writer.memory, writer.tokens, writer.log_probabilities)


class Writer:
    """Reads prompts, then writes as it is iterated: each step yields every sample's new text.

    The arguments are those of :func:`generate`. A step's text is empty where a character takes more
    than one token, while what is written may become a stop string, and after one.

    Example::

        for pieces in memspan.Writer("runs/book", "Once upon a time"):
            print(pieces[0], end="")
    """

    @checked
    def __init__(
        self,
        run: Run | str | Path,
        prompt: str | Iterable[bytes] | Sequence[str] = "",
        *,
        tokens: int = 400,
        samples: int = 1,
        sampling: Sampling = DEFAULT,
        memory: Memory | str | Path | None = None,
        stop: str | Sequence[str] = (),
        log_probabilities: bool = False,
        precision: Precision | None = None,
        cuda_graph: bool = False,
        **options: object,
    ) -> None:
        if tokens < 0 or samples < 1:
            raise MemspanError("tokens must be at least 0, and samples at least 1")
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in stop:
            raise MemspanError("a stop string is empty: leave it out")
        prompts = _prompts(prompt)
        run = opened(run)
        model = run.model
        tokenizer = run.tokenizer
        sizes, reading = options_of(run, options, signature(generate).parameters)
        reading = run.config.model.writing_options(run.config.train.segment_length) | reading
        precision = precision or precision_for(run)
        empty = model.initial_memory(1, **sizes)
        rows = len(prompts) * samples
        refuse_oversized(
            f"the memories of {counted(rows, 'sample')}",
            rows * empty.nbytes,
            empty.tokens_seen.device,
            "lower --samples, or give fewer prompts",
        )
        memory = _memory(run, memory, empty, len(prompts))

        def reader(memory: Memory) -> Reader:
            return model.reader(memory, precision=precision, **reading)

        segment_length = segment_for(run, memory, sizes, reading)
        logits, memory, last = _read(tokenizer, prompts, reader, memory, segment_length)
        # Prompts are read once. The samples continue from there, each in its own row.
        of = torch.arange(len(prompts)).repeat_interleave(samples)
        self._reader = model.reader(
            memory.select(of.to(empty.tokens_seen.device)),
            precision=precision,
            cuda_graph=cuda_graph,
            **reading,
        )
        self._logits = logits[of.to(logits.device)]
        self._sampling = sampling
        self._ahead = 1
        self._n_left = tokens
        self._with_log_probabilities = log_probabilities
        self._samples = []
        for n in of.tolist():
            decoder = StreamDecoder(tokenizer)
            # The text before decides if a space comes first.
            decoder.push(last[n])
            self._samples.append(Sample(decoder, stop))
        self._ended: dict[int, Memory] = {}

    @cached_property
    def _drawn(self) -> Iterator[tuple[list[int], Tensor]]:
        return draw_tokens(self._reader, self._logits, self._n_left, self._sampling, self._ahead)

    @property
    def texts(self) -> list[str]:
        """The samples written so far."""
        return [sample.text for sample in self._samples]

    @property
    def tokens(self) -> list[list[int]]:
        """The ids of the same samples."""
        return [sample.tokens for sample in self._samples]

    @property
    def log_probabilities(self) -> list[list[float]] | None:
        """Log-probabilities of the same ids (None: not requested)."""
        if not self._with_log_probabilities:
            return None
        return [sample.log_probabilities for sample in self._samples]

    @property
    def memory(self) -> Memory:
        """The memory of all that was read and written so far, one row per sample."""
        memory = self._reader.memory
        if self._ended:
            memory = memory.replace([*self._ended], concatenate(self._ended.values()))
        return memory

    def __iter__(self) -> Iterator[list[str]]:
        while len(self._ended) < len(self._samples) and (step := next(self._drawn, None)):
            ids, logits = step
            self._n_left -= 1
            pieces = [
                sample.push(token, last=not self._n_left)
                for sample, token in zip(self._samples, ids, strict=True)
            ]
            if self._with_log_probabilities:
                self._note(logits, ids)
            for row, sample in enumerate(self._samples):
                if sample.stopped and row not in self._ended:
                    # Others go on, and the reader reads all rows.
                    self._ended[row] = self._reader.select([row])
            yield pieces

    def _note(self, logits: Tensor, ids: list[int]) -> None:
        chosen = logits.float().log_softmax(-1)[torch.arange(len(ids)), ids]
        for sample, value in zip(self._samples, chosen.tolist(), strict=True):
            # A sample that has stopped does not take more tokens.
            if len(sample.log_probabilities) < len(sample.tokens):
                sample.log_probabilities.append(value)


def _prompts(prompt: Prompt | Sequence[str]) -> list[Prompt]:
    """A list of texts unchanged, or a list of the only one."""
    if not isinstance(prompt, list | tuple) or not all(isinstance(each, str) for each in prompt):
        return [prompt]  # type: ignore[list-item]
    if not prompt:
        raise MemspanError("the list of prompts is empty: give at least one, or leave it out")
    return list(prompt)


def _memory(run: Run, given: Memory | str | Path | None, empty: Memory, n_prompts: int) -> Memory:
    """One row per prompt."""
    if given is None:
        given = empty
    elif not isinstance(given, Memory):
        given = run.model.load_memory(given)
    if given.batch_size == n_prompts:
        return given
    if given.batch_size != 1:
        raise MemspanError(
            f"the memory has {given.batch_size} rows, for {counted(n_prompts, 'prompt')}: give one "
            "row, such as memory[0], or one per prompt"
        )
    return given.select([0] * n_prompts)


def _read(
    tokenizer: Tokenizer,
    prompts: list[Prompt],
    reader: Callable[[Memory], Reader],
    memory: Memory,
    segment_length: int,
) -> tuple[Tensor, Memory, list[int]]:
    """Logits ``[P, V]`` and memory after P prompts, and the last token of each."""
    if len(prompts) == 1:
        # As it comes, in constant memory.
        one = reader(memory)
        logits, last = read_prompt(one, _encoded(tokenizer, prompts[0]), segment_length)
        return logits, one.memory, [last]
    nothing = np.empty(0, tokenizer.dtype)
    all_ids = [np.concatenate([nothing, *_encoded(tokenizer, each)]) for each in prompts]
    if not all(map(len, all_ids)):
        raise MemspanError("a prompt is empty: give each at least one token")
    logits, memory = _read_together(reader, memory, all_ids, segment_length)
    return logits, memory, [int(ids[-1]) for ids in all_ids]


def _encoded(tokenizer: Tokenizer, prompt: Prompt) -> Iterator[np.ndarray]:
    """The prompt's ids, in pieces; those of the tokenizer's opening if it is empty. Warns of unknown
    ones."""

    def chunks() -> Iterator[bytes]:
        empty = True
        for chunk in [bytes_of(prompt)] if isinstance(prompt, str) else prompt:
            if not isinstance(chunk, bytes | bytearray | memoryview):
                raise MemspanError(
                    "pieces of a prompt are bytes: for several prompts, give a list of texts"
                )
            empty = empty and not chunk
            yield chunk
        if empty:
            yield tokenizer.opening

    n_tokens = n_unknown = 0
    for ids in tokenizer.encode_stream(chunks()):
        n_tokens = n_tokens + len(ids)
        n_unknown = n_unknown + tokenizer.count_unknown(ids)
        yield ids
    if n_unknown:
        parts = tokenizer.unknown_parts(prompt) if isinstance(prompt, str) else iter(())
        shown = ", ".join(repr(part[:20]) for part in islice(dict.fromkeys(parts), SHOWN))
        logging.getLogger("memspan").warning(
            f"{n_unknown:,} of {counted(n_tokens, 'token')} of the prompt "
            f"{'is' if n_unknown == 1 else 'are'} unknown to the run's vocabulary"
            f"{f' (such as {shown})' if shown else ''}, and read as one and the same token"
        )


def read_prompt(
    reader: Reader, prompt: Iterable[np.ndarray], segment_length: int
) -> tuple[Tensor, int]:
    """Read a prompt of any length in segments of ``segment_length`` tokens, into the one row of
    ``reader``; returns the logits ``[1, V]`` after its last token, and that token.

    ``prompt``: ids, 1-D, in pieces of any length.
    """
    logits = None
    last = 0
    for segment in _segments(prompt, segment_length):
        tokens = torch.from_numpy(segment.astype(np.int64))[None]
        logits = reader.read(tokens.to(reader.device))
        last = int(segment[-1])
    if logits is None:
        raise MemspanError("the prompt is empty: give at least one token with --prompt")
    return logits[:, -1], last


def _segments(pieces: Iterable[np.ndarray], length: int) -> Iterator[np.ndarray]:
    """The ids in segments of ``length``, wherever pieces are cut; the last may be shorter."""
    rest = np.empty(0, np.uint8)
    for piece in pieces:
        rest = np.concatenate([rest, piece])
        end = len(rest) // length * length
        yield from rest[:end].reshape(-1, length)
        rest = rest[end:]
    if len(rest):
        yield rest


def _read_together(
    reader_of: Callable[[Memory], Reader],
    memory: Memory,
    prompts: list[np.ndarray],
    length: int,
) -> tuple[Tensor, Memory]:
    """Logits ``[P, V]`` and memory after P prompts, each in the same segments as alone; rows whose
    segments are equally long are read side by side."""
    memories = [memory[row] for row in range(len(prompts))]
    logits = {}
    whole, rests = zip(*(divmod(len(ids), length) for ids in prompts), strict=True)
    # Rows, and the segments that they all have.
    parts = [
        (
            [row for row, n in enumerate(whole) if n > first],
            [slice(n * length, (n + 1) * length) for n in range(first, last)],
        )
        for first, last in pairwise(sorted({0, *whole}))
    ]
    for rest in sorted({*rests} - {0}):
        parts.append(([row for row, n in enumerate(rests) if n == rest], [slice(-rest, None)]))
    for rows, segments in parts:
        reader = reader_of(concatenate(memories[row] for row in rows))
        for segment in segments:
            ids = np.stack([prompts[row][segment] for row in rows]).astype(np.int64)
            found = reader.read(torch.from_numpy(ids).to(reader.device))[:, -1]
        for i, row in enumerate(rows):
            logits[row] = found[i]
            memories[row] = reader.select([i])
    return torch.stack([logits[row] for row in range(len(prompts))]), concatenate(memories)


class Sample:
    """One continuation: its tokens, and its text up to a stop string."""

    def __init__(self, decoder: StreamDecoder, stop: Sequence[str]) -> None:
        self.tokens: list[int] = []
        self.log_probabilities: list[float] = []
        self.text = ""
        """The text without what may yet become a stop string."""
        self.stopped = False
        self._decoder = decoder
        self._stop = stop
        self._held = ""

    def push(self, token: int, last: bool = False) -> str:
        """Add a token, unless the sample has stopped; returns the text that is now certain, which with
        the ``last`` token is all of it."""
        if self.stopped:
            return ""
        self.tokens.append(token)
        piece = self._decoder.push(token)
        if self._stop:
            piece = self._certain(self._held + piece, last)
        self.text += piece
        return piece

    def _certain(self, text: str, last: bool) -> str:
        """The part of ``text`` before a stop string, or before what may become one."""
        n = len(text)
        if ends := [at for stop in self._stop if (at := text.find(stop)) >= 0]:
            self.stopped = True
            n = min(ends)
        elif not last:
            # Characters at the end with which a stop string begins.
            n -= max(k for s in self._stop for k in range(len(s)) if text.endswith(s[:k]))
        self._held = text[n:]
        return text[:n]
