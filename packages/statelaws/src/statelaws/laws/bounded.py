"""The state grows only if it says so."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from statelaws.protocol import Claims, Stateful
from statelaws.reading import called, given_text, reads
from statelaws.report import Outcome
from statelaws.states import leaves_of, size_of

BOUNDED = "bounded"
"""The name of the law."""
EARLY = 10
"""Number of segments after which a state's size is measured first."""
MIDDLE = 500
LATE = 1000
LATE_IF_GROWING = 100
KEEPS = "the model itself keeps"


@torch.no_grad()
def growth(
    model: Stateful[Any], claims: Claims, inputs: Tensor, deadline: float
) -> tuple[Outcome, str]:
    """Measure the state's size in a stream of ``inputs`` and their first token by turns."""
    late = LATE if claims.bounded else LATE_IF_GROWING
    read = reads(model)
    state = called(model.start, len(inputs))
    sizes: dict[int, int] = {}
    kept: dict[int, int] = {}
    for segment in range(1, late + 1):
        if time.process_time() > deadline:
            return "inconclusive", f"{segment - 1} of {late} segments were read in the time"
        # Many models take another path for single tokens.
        part = inputs if segment % 2 else inputs[:, :1]
        state = read(part.clone(), state)[1]
        if segment in (EARLY, MIDDLE, late):
            sizes[segment] = size_of(leaves_of(state))
            kept[segment] = size_of(_kept(model))
    early = sizes[EARLY]
    last = sizes[late]
    # Beside the state; what fills up and stops is a table.
    if kept[late] > max(kept[EARLY], kept.get(MIDDLE, 0)):
        found = ", ".join(f"{size:,} after {segment}" for segment, size in kept.items())
        per_token = (kept[late] - kept[EARLY]) / ((inputs.shape[1] + 1) / 2 * (late - EARLY))
        return "broken", (
            f"{KEEPS} {per_token:,.0f} bytes a token, beside its state: {found} "
            f"segments of {inputs.shape[1]} and 1 tokens"
        )
    if last == early:
        return "holds", f"{last:,} bytes throughout {late} segments"
    measured = ", ".join(f"{size:,} after {segment}" for segment, size in sizes.items())
    text = f"bytes: {measured} segments of {inputs.shape[1]} and 1 tokens"
    if claims.bounded:
        # A window that is longer than the first ten segments fills up, and stops.
        return ("broken" if last > max(early, sizes[MIDDLE]) else "holds"), text
    # Room for more may be made in advance, as much again.
    if last > 2.2 * early * late / EARLY:
        return "broken", f"faster than the text: {text}"
    per_token = (last - early) / ((inputs.shape[1] + 1) / 2 * (late - EARLY))
    return "holds", f"grows by {per_token:,.0f} bytes a token, as it says"


def sizes_text(model: Stateful[Any]) -> str:
    """Code that shows the sizes of a state's file."""
    inputs = given_text(model, "x if segment % 2 else x[:, :1]")
    return f"""\
import pickle
state = start(1)
sizes = []
for segment in range(1000):
    y, state = read({inputs}, state)
    sizes.append(len(pickle.dumps(state)))"""


def _kept(model: Stateful[Any]) -> list[Any]:
    """Tensors and arrays that a model keeps besides its weights and buffers, in attributes or in what
    its functions close over."""
    hidden = ("_parameters", "_buffers", "_modules")
    holders = [vars(each) for each in model.module.modules()]
    holders.append(getattr(model, "__dict__", {}))
    parts = [value for holder in holders for name, value in holder.items() if name not in hidden]
    cells = [cell for part in parts for cell in getattr(part, "__closure__", None) or ()]
    for cell in cells:
        # A cell may be empty.
        with suppress(ValueError):
            parts.append(cell.cell_contents)
    return [
        leaf
        for leaf in leaves_of(parts)
        if isinstance(leaf, Tensor) or isinstance(getattr(leaf, "nbytes", None), int)
    ]
