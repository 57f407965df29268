"""Drawing tokens one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from memspan.errors import NonFiniteError
from memspan.lab.sampling import Sampling
from memspan.models.language_model import Reader


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


def draw(p: Tensor, generator: torch.Generator) -> Tensor:
    """A token for every row: ``[B, V] -> int64 [B, 1]``.

    One random number per row is looked up among the cumulative probabilities; ``torch.multinomial``
    draws one for every token of the vocabulary, which took a tenth as long as reading.
    """
    sums = p.cumsum(-1, dtype=torch.float64)
    at = torch.rand(len(p), 1, dtype=torch.float64, generator=generator) * sums[:, -1:]
    # The first whose sum is larger, so never one of probability zero.
    return torch.searchsorted(sums, at, right=True)


def draw_tokens(
    reader: Reader, logits: Tensor, n_tokens: int, sampling: Sampling
) -> Iterator[tuple[list[int], Tensor]]:
    """Draw ``n_tokens`` tokens for every row, and yield each step's ids and the logits ``[B, V]`` that
    they were drawn from, on the CPU. ``logits``: ``[B, V]`` after the prompt.

    Every token is read before it is yielded, so that ``reader.memory`` covers all that was yielded.
    """
    generator = torch.Generator()
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)
    for _ in range(n_tokens):
        # On the CPU, so that a seed gives the same text on every device.
        before = logits.cpu()
        p = probabilities(before, sampling)
        # The sum of finite logits may overflow.
        if not math.isfinite(logits.sum()) and not logits.isfinite().all():
            raise NonFiniteError(
                "the logits are not finite: the weights or the memory have overflowed; use an "
                "earlier checkpoint, or start without the saved memory"
            )
        drawn = draw(p, generator)
        logits = reader.read(drawn.to(logits.device))[:, -1]
        yield drawn[:, 0].tolist(), before
