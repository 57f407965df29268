"""The rules token by token, in plain autograd: to be read beside the paper."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from memspan.ops.fast_weights.feature_maps import in_plain_autograd
from memspan.ops.fast_weights.rules import RuleInputs


def run(
    inputs: RuleInputs,
    activation: Callable[[Tensor], Tensor] | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The delta rule, eq. 24 and 25, or without ``beta`` the sum rule, eq. 17; with an ``activation``
    of the memory after each token eq. 2.

    A decay comes before a token reads or writes (Yang et al. 2024, arXiv 2412.06464, eq. 10), and so
    does emptying the memory where a document starts. ``lengths``: as in
    :func:`~memspan.ops.fast_weights.rules.outer_product_rule`.
    """
    inputs = inputs.by_value_head()
    features = in_plain_autograd(inputs.feature_map or (lambda x: x))
    q = features(inputs.q)
    k = features(inputs.k)
    weights = inputs.weights
    outputs = []
    length = k.shape[2]
    betas = [None] * length if inputs.beta is None else inputs.beta.unbind(2)
    decays = [None] * length if inputs.log_decay is None else _decays(inputs.log_decay)
    starts = [None] * length if inputs.starts is None else inputs.starts.unbind(1)
    tokens = zip(q.unbind(2), k.unbind(2), inputs.v.unbind(2), betas, decays, starts, strict=True)
    for t, (q_t, k_t, written, beta_t, decay_t, start_t) in enumerate(tokens):
        before = weights
        if start_t is not None:
            weights = weights.masked_fill(start_t[:, None, None, None], 0)
        if decay_t is not None:
            weights = decay_t * weights
        if beta_t is not None:
            written = beta_t.unsqueeze(-1) * (written - read(k_t, weights))
        weights = weights + outer(k_t, written)
        if activation is not None:
            weights = activation(weights)
        if lengths is not None:
            weights = weights.where((t < lengths)[:, None, None, None], before)
        outputs.append(read(q_t, weights))
    return torch.stack(outputs, 2), weights


def _decays(log_decay: Tensor) -> tuple[Tensor, ...]:
    """Token by token, of each head ``[B, H, 1, 1]`` or of each feature ``[B, H, F, 1]``."""
    per_feature = log_decay if log_decay.dim() == 4 else log_decay.unsqueeze(-1)
    return per_feature.exp().unsqueeze(-1).unbind(2)


def read(q: Tensor, weights: Tensor) -> Tensor:
    """``q W``: ``[B, H, F], [B, H, F, V] -> [B, H, V]``."""
    return (q.unsqueeze(-2) @ weights).squeeze(-2)


def outer(k: Tensor, v: Tensor) -> Tensor:
    """``k (x) v``: ``[B, H, F], [B, H, V] -> [B, H, F, V]``."""
    return k.unsqueeze(-1) * v.unsqueeze(-2)
