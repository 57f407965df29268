"""The generalized delta rule token by token, in plain autograd: to be read beside the equation."""

from __future__ import annotations

import torch
from torch import Tensor

from memspan.ops.delta_rules.rule import Inputs


def run(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``S' = diag(alpha) S - a (c S) + k (x) v``, then ``y = q S'``."""
    q, k, v, weights, log_decay, erase, lookup, starts, _ = inputs
    if log_decay is not None and log_decay.dim() == 3:
        log_decay = log_decay.unsqueeze(-1)
    outputs = []
    for t in range(k.shape[2]):
        if starts is not None:
            weights = weights.masked_fill(starts[:, t, None, None, None], 0)
        before = weights
        if log_decay is not None:
            weights = log_decay[:, :, t].exp().unsqueeze(-1) * before
        if erase is not None and lookup is not None:
            found = read(lookup[:, :, t], before)
            weights = weights - outer(erase[:, :, t], found)
        weights = weights + outer(k[:, :, t], v[:, :, t])
        outputs.append(read(q[:, :, t], weights))
    return torch.stack(outputs, 2), weights


def read(q: Tensor, weights: Tensor) -> Tensor:
    """``q S``: ``[B, H, K], [B, H, K, V] -> [B, H, V]``."""
    return (q.unsqueeze(-2) @ weights).squeeze(-2)


def outer(k: Tensor, v: Tensor) -> Tensor:
    """``k (x) v``: ``[B, H, K], [B, H, V] -> [B, H, K, V]``."""
    return k.unsqueeze(-1) * v.unsqueeze(-2)
