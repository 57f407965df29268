"""Continuing a text token by token, in constant memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from memspan.data.tokenizers.utf8 import bytes_of
from memspan.errors import MemspanError, NonFiniteError
from memspan.memory import Memory
from memspan.models.protocol import TokenReader
from memspan.models.sizes import refuse_oversized
from memspan.precision.products import Precision
from memspan.runs.reading import opened, options_of, precision_for, segment_for
from memspan.runs.run import Run
from memspan.sampling import DEFAULT, Sampling


@dataclass(frozen=True)
class Generation:
    """What a model wrote."""

    texts: list[str]
    """The samples, without the prompt."""
    memory: Memory
    """The memory of all that was read and written, one row per sample. ``memory.select([0])`` is the
    first sample's."""
    tokens: list[list[int]]
    """The samples' ids."""

    @property
    def text(self) -> str:
        """The first sample."""
        return self.texts[0]


def generate(
    run: Run | str | Path,
    prompt: str | Iterable[bytes] = "",
    *,
    tokens: int = 400,
    samples: int = 1,
    sampling: Sampling = DEFAULT,
    memory: Memory | str | Path | None = None,
    precision: Precision | None = None,
    **options: object,
) -> Generation:
    """Continue a text, as ``memspan generate`` does. :class:`Writer` gives it while it is written.

    Args:
        run: the run, or its folder.
        prompt: the text to continue, or the pieces of a long one (empty: a line break or,
            if the vocabulary has none, its first token).
        tokens: tokens to write per sample (0: only read the prompt).
        samples: continuations of the same prompt, written side by side.
        sampling: how tokens are drawn.
        memory: what was read before, one row, or a file that holds it (None: nothing).
        precision: of matrix products (None: float32, multiplied as in training).
        options: the architecture's own, such as ``attention_span="fixed"`` (left out: as in training).

    Raises:
        MemspanError: there is no such run or option, or the memory is another model's.
        NonFiniteError: the model's logits are NaN or infinite.

    Example::

        book = memspan.generate("runs/book", "Once upon a time", tokens=100)
        print(book.text)
        more = memspan.generate("runs/book", " and then", memory=book.memory)
    """
    writer = Writer(
        run,
        prompt,
        tokens=tokens,
        samples=samples,
        sampling=sampling,
        memory=memory,
        precision=precision,
        **options,
    )
    for _ in writer:
        pass
    return Generation(writer.texts, writer.memory, writer.tokens)


class Writer:
    """Reads a prompt, then writes as it is iterated: each step gives every sample's new text.

    The arguments are those of :func:`generate`. A step's text is empty where a character takes more
    than one token.

    Example::

        for pieces in Writer("runs/book", "Once upon a time"):
            print(pieces[0], end="")
    """

    texts: list[str]
    """The samples as far as they are written."""
    tokens: list[list[int]]
    """The ids of the same samples."""

    def __init__(
        self,
        run: Run | str | Path,
        prompt: str | Iterable[bytes] = "",
        *,
        tokens: int = 400,
        samples: int = 1,
        sampling: Sampling = DEFAULT,
        memory: Memory | str | Path | None = None,
        precision: Precision | None = None,
        **options: object,
    ) -> None:
        if tokens < 0 or samples < 1:
            raise MemspanError("tokens must be at least 0, and samples at least 1")
        run = opened(run)
        model, tokenizer = run.model, run.tokenizer
        sizes, reading = options_of(run, options)
        precision = precision or precision_for(run)
        empty = model.initial_memory(1, **sizes)
        device = empty.tokens_seen.device
        refuse_oversized(
            f"the memories of {samples:,} samples",
            samples * empty.nbytes,
            device,
            "lower --samples",
        )
        if memory is None:
            memory = empty
        elif not isinstance(memory, Memory):
            memory = model.load_memory(memory)
        if memory.batch_size != 1:
            raise MemspanError(
                f"the memory has {memory.batch_size} rows: take one, as with memory.select([0])"
            )
        reader = model.reader(memory, precision=precision, **reading)
        last: list[int] = []
        ids = tokenizer.encode_stream(_chunks(prompt, tokenizer.opening))
        segment_length = segment_for(run, memory, sizes, reading)
        logits = read_prompt(reader, _noting_the_last(ids, last), segment_length)
        # The prompt is read once. The samples continue from there, each in its own row.
        self._reader = model.reader(
            reader.memory.select([0] * samples), precision=precision, **reading
        )
        self._decoders = [tokenizer.stream_decoder() for _ in range(samples)]
        # Whether a space comes first depends on what is before it.
        for decoder in self._decoders:
            for token in last:
                decoder.push(token)
        self._drawn = draw_tokens(self._reader, logits.expand(samples, -1), tokens, sampling)
        self.texts = [""] * samples
        self.tokens = [[] for _ in range(samples)]

    @property
    def memory(self) -> Memory:
        """The memory of all that was read and written so far, one row per sample."""
        return self._reader.memory

    def __iter__(self) -> Iterator[list[str]]:
        for ids in self._drawn:
            pieces = [d.push(i) for d, i in zip(self._decoders, ids, strict=True)]
            for sample, token in zip(self.tokens, ids, strict=True):
                sample.append(token)
            self.texts = [text + piece for text, piece in zip(self.texts, pieces, strict=True)]
            yield pieces


def _chunks(prompt: str | Iterable[bytes], opening: bytes) -> Iterator[bytes]:
    """The prompt's bytes; ``opening`` if there are none."""
    if isinstance(prompt, str):
        prompt = [bytes_of(prompt)]
    empty = True
    for chunk in prompt:
        empty = empty and not chunk
        yield chunk
    if empty:
        yield opening


def _noting_the_last(pieces: Iterable[np.ndarray], last: list[int]) -> Iterator[np.ndarray]:
    """The same pieces of tokens; ``last`` then holds the last token of all, if there is any."""
    for piece in pieces:
        if piece.size:
            last[:] = [int(piece[-1])]
        yield piece


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The next token's distribution after all filters: ``[B, V] -> [B, V]``."""
    logits = logits.float()
    if sampling.temperature == 0:
        likeliest = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, likeliest, 1.0)
    p = (logits / sampling.temperature).softmax(-1)
    if sampling.top_k is not None and sampling.top_k < p.shape[-1]:
        among = torch.zeros_like(p, dtype=torch.bool)
        p = p * among.scatter_(-1, p.topk(sampling.top_k).indices, True)
    if sampling.top_p is not None:
        ordered, index = (p / p.sum(-1, keepdim=True)).sort(-1, descending=True)
        # A token stays while those before it do not reach top_p, so the first always stays.
        ordered = ordered * (ordered.cumsum(-1) - ordered < sampling.top_p)
        p = torch.zeros_like(p).scatter_(-1, index, ordered)
    if sampling.min_p is not None:
        p = p * (p >= sampling.min_p * p.amax(-1, keepdim=True))
    return p / p.sum(-1, keepdim=True)


def read_prompt(reader: TokenReader, prompt: Iterable[np.ndarray], segment_length: int) -> Tensor:
    """Read a prompt of any length in segments; returns the logits ``[1, V]`` after its last token.

    Args:
        reader: of one row.
        prompt: token ids, 1-D, in pieces of any length.
        segment_length: tokens that are read at once, T.

    Raises:
        MemspanError: the prompt has no tokens.
    """
    logits = None
    for segment in _segments(prompt, segment_length):
        tokens = torch.from_numpy(segment.astype(np.int64))[None]
        logits = reader.read(tokens.to(reader.device))
    if logits is None:
        raise MemspanError("the prompt is empty: give at least one token with --prompt")
    return logits[:, -1]


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


def draw_tokens(
    reader: TokenReader, logits: Tensor, n_tokens: int, sampling: Sampling
) -> Iterator[list[int]]:
    """Draw ``n_tokens`` tokens for every row, and yield each step's ids.

    Every token is read before it is yielded, so that ``reader.memory`` covers all that was yielded.

    Args:
        reader: B rows, after the prompt.
        logits: ``[B, V]`` after the prompt, from :func:`read_prompt`.
        n_tokens: tokens per row.
        sampling: how tokens are drawn.

    Raises:
        NonFiniteError: the model's logits are NaN or infinite.
    """
    generator = torch.Generator()
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)
    for _ in range(n_tokens):
        # On the CPU, so that a seed gives the same text on every device.
        p = probabilities(logits.cpu(), sampling)
        # The sum of finite logits may overflow.
        if not math.isfinite(logits.sum()) and not logits.isfinite().all():
            raise NonFiniteError(
                "the logits are not finite: the weights or the memory have overflowed; use an "
                "earlier checkpoint, or start without the saved memory"
            )
        drawn = torch.multinomial(p, 1, generator=generator)
        logits = reader.read(drawn.to(logits.device))[:, -1]
        yield drawn[:, 0].tolist()
