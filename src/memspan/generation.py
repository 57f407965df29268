"""Writing on from a text that was read, token by token, in constant memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from memspan.errors import MemspanError, NonFiniteError
from memspan.models import Reader
from memspan.sampling import Sampling

PROMPT_SEGMENT = 256
"""Tokens of a prompt that are read at once."""


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Next-token distribution after all filters: ``[B, V] -> [B, V]``."""
    logits = logits.float()
    if sampling.temperature == 0:
        likeliest = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, likeliest, 1.0)
    p = (logits / sampling.temperature).softmax(-1)
    if sampling.top_k is not None and sampling.top_k < p.shape[-1]:
        kept = torch.zeros_like(p, dtype=torch.bool)
        p = p * kept.scatter_(-1, p.topk(sampling.top_k).indices, True)
    if sampling.top_p is not None:
        ordered, index = (p / p.sum(-1, keepdim=True)).sort(-1, descending=True)
        # A token stays while those before it do not reach top_p yet: the first always stays.
        ordered = ordered * (ordered.cumsum(-1) - ordered < sampling.top_p)
        p = torch.zeros_like(p).scatter_(-1, index, ordered)
    if sampling.min_p is not None:
        p = p * (p >= sampling.min_p * p.amax(-1, keepdim=True))
    return p / p.sum(-1, keepdim=True)


def read_prompt(reader: Reader, prompt: Iterable[np.ndarray]) -> Tensor:
    """Read a prompt of any length in segments; the logits ``[1, V]`` after its last token.

    ``reader`` has one row. ``prompt``: its ids, 1-D, in pieces of any length.

    Raises:
        MemspanError: the prompt has no tokens.
    """
    logits = None
    for segment in _segments(prompt):
        tokens = torch.from_numpy(segment.astype(np.int64))[None]
        logits = reader.read(tokens.to(reader.device))
    if logits is None:
        raise MemspanError("the prompt is empty: give at least one token with --prompt")
    return logits[:, -1]


def _segments(pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """All ids in segments of ``PROMPT_SEGMENT``, the last one shorter, however the pieces are cut."""
    waiting = np.empty(0, np.uint8)
    for piece in pieces:
        waiting = np.concatenate([waiting, piece])
        whole = len(waiting) // PROMPT_SEGMENT * PROMPT_SEGMENT
        yield from waiting[:whole].reshape(-1, PROMPT_SEGMENT)
        waiting = waiting[whole:]
    if len(waiting):
        yield waiting


def draw_tokens(
    reader: Reader, logits: Tensor, n_tokens: int, sampling: Sampling
) -> Iterator[list[int]]:
    """Draw ``n_tokens`` tokens for every row, yielding each step's ids as they come.

    Every token drawn is also read, so that ``reader.memory`` covers all that was yielded.

    Args:
        reader: stands after the prompt.
        logits: ``[B, V]``, what the model says after the prompt, from :func:`read_prompt`.
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
        # Drawn on the CPU, so that a seed gives the same text on every device.
        p = probabilities(logits.cpu(), sampling)
        if not logits.isfinite().all():
            raise NonFiniteError(
                "what the model says is not finite: its weights or its memory have overflowed; use "
                "an earlier checkpoint, or start without the saved memory"
            )
        drawn = torch.multinomial(p, 1, generator=generator)
        logits = reader.read(drawn.to(logits.device))[:, -1]
        yield drawn[:, 0].tolist()
