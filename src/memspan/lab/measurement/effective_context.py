"""Relative effective context length of a group of models (Dai et al. 2019, section 4.3, appendix C).

With ``l_i(c, t)`` the loss of model ``i`` on token ``t`` with ``c`` tokens of context, the baseline is
the best short-context model token by token, ``b(c, t) = min_i l_i(c, t)``. Only what a longer context
``c'`` improves on it counts, so the gain of model ``i`` in perplexity is::

    g_i(c, c') = 1 - exp( mean_t min(b(c, t), l_i(c', t)) - mean_t b(c, t) )

with the mean over the share r of tokens whose baseline is worst. The context is lengthened as long as
the gain is at least :data:`THRESHOLD`; where that ends is the model's length. All models improve on the
same baseline, so that they can be compared, whatever they know from short contexts.

Differs from the paper: contexts double from step to step, where the paper adds a constant.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memspan.lab.measurement.span import Span

THRESHOLD = 0.01
SHARES = (0.1, 0.5, 1.0)
"""The paper's r: shares of the tokens, of which only the hardest count."""


@dataclass(frozen=True)
class EffectiveContext:
    """The effective context of one run in the group."""

    run: str
    tokens: dict[float, int]
    """The length by r."""
    longest: int
    """Longest history, in tokens, with which all were measured: a length that reaches it may be
    longer."""


def effective_context(spans: dict[str, Span]) -> list[EffectiveContext]:
    """The effective context of every run, by its folder, on the targets and histories that they share;
    empty if they share none."""
    n_points = min(len(span.points) for span in spans.values())
    shared = set.intersection(*(set(span.first.tolist()) for span in spans.values()))
    if not shared or len({span.losses.shape[1] for span in spans.values()}) > 1:
        return []
    scale = [point.history for point in next(iter(spans.values())).points[:n_points]]
    of_blocks = []
    for span in spans.values():
        rows = span.losses[[span.first.tolist().index(first) for first in sorted(shared)]]
        of_blocks.append(rows[..., :n_points].reshape(-1, n_points))
    losses = np.stack(of_blocks)
    return [
        EffectiveContext(run, {r: scale[_length(losses, i, r)] for r in SHARES}, scale[-1])
        for i, run in enumerate(spans)
    ]


def _length(losses: np.ndarray, i: int, share: float) -> int:
    """The step at which model ``i`` gains no more. ``losses``: ``[models, targets, steps]``."""
    n_hard = max(1, round(share * losses.shape[1]))
    for step in range(losses.shape[2] - 1):
        baseline = losses[:, :, step].min(0)
        hard = np.argsort(-baseline, kind="stable")[:n_hard]
        better = np.minimum(baseline, losses[i, :, step + 1])
        gain = 1 - np.exp(better[hard].mean() - baseline[hard].mean())
        if gain < THRESHOLD:
            return step
    return losses.shape[2] - 1
