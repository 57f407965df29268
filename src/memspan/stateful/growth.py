"""The law ``bounded``: how a state's size develops as a stream goes on."""

from __future__ import annotations

import time
from typing import Any, Literal

import torch
from torch import Tensor

from memspan.stateful.case import Reading
from memspan.stateful.protocol import leaves_of

EARLY, MIDDLE, LATE = 10, 500, 1000
"""Numbers of segments after which the size is measured."""
LATE_IF_GROWING = 100
SCRIPT = """\
import pickle
state, sizes = start(1), []
for segment in range(1000):
    y, state = read(x if segment % 2 else x[:, :1], state)
    sizes.append(len(pickle.dumps(state)))"""
"""Code that shows the sizes of a state's file."""


def size_of(state: Any) -> int:
    """Bytes of all tensors, and eight for everything else."""
    return sum(
        leaf.numel() * leaf.element_size() if isinstance(leaf, Tensor) else 8
        for leaf in leaves_of(state)
    )


@torch.no_grad()
def growth(
    reading: Reading, deadline: float
) -> tuple[Literal["holds", "broken", "inconclusive"], str]:
    """The outcome of the law, and why. Segments are ``reading.x`` and its first token by turns."""
    model, inputs = reading.model, reading.x.value
    bounded, tokens = model.claims.bounded, inputs.shape[1]
    late = LATE if bounded else LATE_IF_GROWING
    state, sizes = model.start(len(inputs)), {}
    for segment in range(1, late + 1):
        if time.process_time() > deadline:
            return "inconclusive", f"{segment - 1} of {late} segments were read in the time"
        # Many models take another path for single tokens.
        part = inputs if segment % 2 else inputs[:, :1]
        state = model.read(part.clone(), state)[1]
        if segment in (EARLY, MIDDLE, late):
            sizes[segment] = size_of(state)
    early, last = sizes[EARLY], sizes[late]
    if last == early:
        return "holds", f"{last:,} bytes throughout {late} segments"
    said = [f"{size:,} after {segment}" for segment, size in sizes.items()]
    text = f"bytes: {', '.join(said)} segments of {tokens} and 1 tokens"
    if bounded:
        # A window that is longer than the first ten segments fills up, and stops.
        return ("broken" if last > max(early, sizes[MIDDLE]) else "holds"), text
    if last > 1.1 * early * late / EARLY:
        return "broken", f"faster than the text: {text}"
    per_token = (last - early) / ((tokens + 1) / 2 * (late - EARLY))
    return "holds", f"grows by {per_token:,.0f} bytes a token, as it says"
