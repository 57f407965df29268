"""Products of decays within a chunk: none, one per head, or one per channel of the keys.

The tokens of a chunk are computed at once: token ``i`` reads the write of token ``j`` after the decays
of the tokens ``j + 1`` to ``i``, and the memory from before the chunk after those of all tokens to
``i``. With ``lag`` 1 a token reads before its own decay, and so before its own write.

A product's logarithm is a sum over just the tokens that it spans: a difference of sums from the chunk's
start would lose what is small beside a strong decay further back. No logarithm that is exponentiated is
above 0, and it may be ``-inf``.
"""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 8
"""Tokens between any two of which a decay per channel is computed by itself: wider blocks need more
memory, narrower ones more operations."""

Lag = Literal[0, 1]


@runtime_checkable
class Decay(Protocol):
    """Decays in chunks of ``G`` tokens, for tensors ``[N, M, G, K]``: ``N`` chunks, ``M`` heads."""

    def gram(self, x: Tensor, y: Tensor, lag: Lag = 0) -> Tensor:
        """Products of each token's ``x`` with the ``y`` of the tokens up to it, with ``lag`` 1 of those
        before it, times the decays between them: ``[N, M, G, G]``, lower triangular."""

    def since(self, x: Tensor, lag: Lag = 0) -> Tensor:
        """``x`` times the decay from the chunk's start to each token."""

    def until(self, x: Tensor) -> Tensor:
        """``x`` times the decay from each token to the chunk's end."""

    def whole(self, n: int, weights: Tensor) -> Tensor:
        """The memory ``[M, K, V]`` after all decays of chunk ``n``."""


class NoDecay:
    """A memory that keeps everything: see :class:`Decay`."""

    def gram(self, x: Tensor, y: Tensor, lag: Lag = 0) -> Tensor:
        return (x @ y.mT).tril(-lag)

    def since(self, x: Tensor, lag: Lag = 0) -> Tensor:
        return x

    def until(self, x: Tensor) -> Tensor:
        return x

    def whole(self, n: int, weights: Tensor) -> Tensor:
        return weights


class HeadDecay:
    """One decay per head and token: see :class:`Decay`.

    Args:
        log_decay: ``[N, M, G, 1]``.
    """

    between: Tensor
    """From token ``j`` to token ``i``, without ``j``'s own: ``[N, M, G, G]``, 0 above the diagonal."""
    from_start: Tensor
    """From the chunk's start to each token, ``[N, M, G, 1]``."""
    to_end: Tensor
    """From each token to the chunk's end, ``[N, M, G, 1]``."""

    def __init__(self, log_decay: Tensor) -> None:
        self.between = _spans(log_decay.squeeze(-1)).exp()
        self.from_start = log_decay.cumsum(-2).exp()
        self.to_end = self.between[..., -1:, :].mT

    def gram(self, x: Tensor, y: Tensor, lag: Lag = 0) -> Tensor:
        between = self.between if lag == 0 else F.pad(self.between, (0, 0, 1, -1))
        return (x @ y.mT) * between

    def since(self, x: Tensor, lag: Lag = 0) -> Tensor:
        return x * _before(self.from_start, lag)

    def until(self, x: Tensor) -> Tensor:
        return x * self.to_end

    def whole(self, n: int, weights: Tensor) -> Tensor:
        return self.from_start[n, :, -1:] * weights


class ChannelDecay:
    """A decay per channel and token: see :class:`Decay`.

    Between two tokens of a block of :data:`BLOCK` tokens each decay is a number of its own. Between
    tokens of different blocks it is the product of that from the earlier token to the later block's
    start, and that from there to the later token: then it is a product of matrices.

    Args:
        log_decay: ``[N, M, G, K]``.
    """

    def __init__(self, log_decay: Tensor) -> None:
        blocks = log_decay.split(BLOCK, -2)
        # From the block's start to each of its tokens, and between any two of them, [.., i, j, K].
        self._in_block = [block.cumsum(-2).exp() for block in blocks]
        self._between = [_spans(block.mT).movedim(-3, -1).exp() for block in blocks]
        # From each earlier token to the start of the block.
        until = log_decay[..., :0, :]
        self._until = [until]
        for in_block, between in zip(self._in_block, self._between, strict=True):
            until = torch.cat([until * in_block[..., -1:, :], between[..., -1, :, :]], -2)
            self._until.append(until)
        since = [self._in_block[0]]
        for in_block in self._in_block[1:]:
            since.append(since[-1][..., -1:, :] * in_block)
        self._since = torch.cat(since, -2)

    def gram(self, x: Tensor, y: Tensor, lag: Lag = 0) -> Tensor:
        rows = []
        size = y.shape[-2]
        start = 0
        blocks = zip(x.split(BLOCK, -2), self._in_block, self._between, self._until, strict=False)
        for x_block, in_block, between, until in blocks:
            end = start + x_block.shape[-2]
            if lag == 1:
                between = F.pad(between, (0, 0, 0, 0, 1, -1))
            earlier = (x_block * _before(in_block, lag)) @ (y[..., :start, :] * until).mT
            spans = x_block.unsqueeze(-2) * between
            within = (spans * y[..., None, start:end, :]).sum(-1)
            rows.append(F.pad(torch.cat([earlier, within], -1), (0, size - end)))
            start = end
        return torch.cat(rows, -2)

    def since(self, x: Tensor, lag: Lag = 0) -> Tensor:
        return x * _before(self._since, lag)

    def until(self, x: Tensor) -> Tensor:
        return x * self._until[-1]

    def whole(self, n: int, weights: Tensor) -> Tensor:
        return self._since[n, :, -1].unsqueeze(-1) * weights


def _spans(log_decay: Tensor) -> Tensor:
    """Sums over the tokens ``j + 1`` to ``i``, ``[..., G] -> [..., i, j]``; -inf for later ``j``."""
    size = log_decay.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).triu()
    # Masked, not multiplied by 0: a logarithm may be -inf.
    each = log_decay.unsqueeze(-1).expand(*log_decay.shape, size).masked_fill(later, 0.0)
    return each.cumsum(-2).masked_fill(later.triu(1), -torch.inf)


def _before(since: Tensor, lag: Lag) -> Tensor:
    """``[..., G, K]``: with ``lag`` 1 to the token before, where the first has 1."""
    if lag == 0:
        return since
    return F.pad(since[..., :-1, :], (0, 0, 1, 0), value=1.0)
