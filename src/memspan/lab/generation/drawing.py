"""Drawing tokens one by one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from memspan.errors import NonFiniteError
from memspan.lab.sampling import Sampling
from memspan.models.language_model import Reader
from memspan.trees import to_device

AHEAD = 16
"""Tokens to draw before the host looks at any, where nobody sees the memory in between."""


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


def draw(p: Tensor, numbers: Tensor) -> Tensor:
    """A token for every row, by a random ``number`` of each, ``[B, 1]`` in 0 .. 1: ``[B, V] -> int64
    [B, 1]``.

    The number is looked up among the cumulative probabilities; ``torch.multinomial`` draws one for
    every token of the vocabulary, which took a tenth as long as reading.
    """
    sums = p.cumsum(-1, dtype=torch.float64)
    # The first whose sum is larger, so never one of probability zero. NaN must stay a token, too.
    found = torch.searchsorted(sums, numbers * sums[:, -1:], right=True)
    return found.clamp_(max=p.shape[-1] - 1)


def draw_tokens(
    reader: Reader, logits: Tensor, n_tokens: int, sampling: Sampling, ahead: int = 1
) -> Iterator[tuple[list[int], Tensor]]:
    """Draw ``n_tokens`` tokens for every row, and yield each step's ids and the logits ``[B, V]`` that
    they were drawn from. ``logits``: ``[B, V]`` after the prompt.

    Every token is read before it is yielded, so that ``reader.memory`` covers all that was yielded.
    With ``ahead``, so many are drawn and read before the host looks at any: the device is waited for
    once for all of them, and the memory may be ahead of what was yielded.

    Random numbers are the CPU's: with a seed, the text differs between devices only where rounding
    turns a draw.
    """
    generator = torch.Generator()
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)
    rows = len(logits)
    # Other devices may lack float64.
    place = logits.device if logits.device.type == "cuda" else torch.device("cpu")
    for first in range(0, n_tokens, ahead):
        n_steps = min(ahead, n_tokens - first)
        numbers = torch.rand(n_steps, rows, 1, dtype=torch.float64, generator=generator)
        finite = torch.ones((), dtype=torch.bool, device=place)
        ids = []
        befores = []
        for number in to_device(numbers, place):
            before = to_device(logits, place)
            befores.append(before)
            finite &= before.isfinite().all()
            ids.append(draw(probabilities(before, sampling), number))
            logits = reader.read(to_device(ids[-1], logits.device))[:, -1]
        drawn = torch.cat([torch.cat(ids, 1).flatten(), finite[None]]).tolist()
        if not drawn.pop():
            raise NonFiniteError(
                "the logits are not finite: the weights or the memory have overflowed; use an "
                "earlier checkpoint, or start without the saved memory"
            )
        for step, before in enumerate(befores):
            yield drawn[step::n_steps], before
