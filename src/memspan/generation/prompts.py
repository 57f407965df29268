"""Read prompts: one of any length, or many side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from memspan.errors import MemspanError
from memspan.memory import Memory, concatenate
from memspan.models.protocol import TokenReader


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


def read_prompts(
    reader_of: Callable[[Memory], TokenReader],
    memory: Memory,
    prompts: Sequence[np.ndarray],
    segment_length: int,
) -> tuple[Tensor, Memory]:
    """Read a prompt in each row, in the same segments as alone; rows whose segments are equally long
    are read together.

    Args:
        reader_of: makes a reader that continues from a memory.
        memory: before the prompts, P rows.
        prompts: P prompts of at least one token, 1-D each.
        segment_length: tokens that are read at once, T.

    Returns:
        The logits ``[P, V]`` after the last tokens, and the memory after them.
    """
    segments = [list(_segments([ids], segment_length)) for ids in prompts]
    logits, memories = {}, {}
    # Rows, their memory, and how many segments they have read.
    waiting = [(list(range(len(prompts))), memory, 0)]
    while waiting:
        rows, memory, n_read = waiting.pop()
        for length in {len(segments[row][n_read]) for row in rows}:
            at = [i for i, row in enumerate(rows) if len(segments[row][n_read]) == length]
            alike, n = [rows[i] for i in at], n_read
            reader = reader_of(memory.select(at))
            while True:
                ids = torch.from_numpy(
                    np.stack([segments[row][n] for row in alike]).astype(np.int64)
                )
                last, n = reader.read(ids.to(reader.device))[:, -1], n + 1
                if {len(segments[row]) > n and len(segments[row][n]) for row in alike} != {length}:
                    break
            done = [i for i, row in enumerate(alike) if len(segments[row]) == n]
            for i in done:
                logits[alike[i]], memories[alike[i]] = last[i], reader.select([i])
            going_on = [i for i in range(len(alike)) if i not in done]
            if going_on:
                waiting.append(([alike[i] for i in going_on], reader.select(going_on), n))
    order = range(len(prompts))
    return torch.stack([logits[p] for p in order]), concatenate(memories[p] for p in order)
