"""The law ``bounded``: what a state's size does as a stream goes on."""

from __future__ import annotations

import time
from typing import Any, Literal

import torch
from torch import Tensor

from memspan.stateful.laws import length_of
from memspan.stateful.protocol import Claims, Stateful, leaves_of
from memspan.stateful.reading import device_of

EARLY, MIDDLE, LATE = 10, 500, 1000
"""Segments after which the size is taken."""


def size_of(state: Any) -> int:
    """Bytes of all tensors, and eight for everything else."""
    return sum(
        leaf.numel() * leaf.element_size() if isinstance(leaf, Tensor) else 8
        for leaf in leaves_of(state)
    )


@torch.no_grad()
def growth(
    model: Stateful[Any], claims: Claims, seed: int, deadline: float
) -> tuple[Literal["holds", "broken", "inconclusive"], str]:
    """The outcome of the law, and why. Segments are so long that ten fill every internal length."""
    tokens = -(-length_of(claims) // EARLY)
    late = LATE if model.claims.bounded else 10 * EARLY
    generator = torch.Generator().manual_seed(seed)
    inputs = model.inputs.draw(1, tokens, generator).to(device_of(model))
    state, sizes = model.start(1), {}
    for segment in range(1, late + 1):
        if time.monotonic() > deadline:
            return "inconclusive", f"{segment - 1} of {late} segments were read in the time"
        state = model.read(inputs, state)[1]
        if segment in (EARLY, MIDDLE, late):
            sizes[segment] = size_of(state)
    early, last = sizes[EARLY], sizes[late]
    if not model.claims.bounded:
        per_token = (last - early) / (tokens * (late - EARLY))
        if last > 1.1 * early * late / EARLY:
            return "broken", f"faster than the stream: {early:,} bytes after {EARLY} segments, " + (
                f"{last:,} after {late}"
            )
        return "holds", f"grows by {per_token:,.0f} bytes a token, as it says"
    # A window that is longer than the first ten segments fills up, and stops.
    if last > early and last > sizes[MIDDLE]:
        text = (
            f"{early:,} bytes after {EARLY} segments of {tokens}, {sizes[MIDDLE]:,} after {MIDDLE}"
        )
        return "broken", f"{text}, {last:,} after {late}"
    return "holds", f"{last:,} bytes after {late} segments"
