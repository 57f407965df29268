"""Lower bounds on a model's memory, so that sizes far beyond this machine are refused at once.

A model that is a little too large still fails when memory runs out. These checks catch slips such as a
few zeros too many, which would otherwise take minutes and all of the machine's memory before they fail.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from memspan.errors import MemspanError, counted
from memspan.models.options import BackboneConfig, EmbeddingConfig

MOST_LAYERS = 10_000
"""Creating a layer takes a millisecond, however narrow it is."""
BYTES = 4
"""Bytes of a float32 number."""
REMEDY = (
    "lower n_layers, d_model, d_ff, n_heads, d_head, the vocabulary, max_distance or memory_length"
)


def refuse_oversized_model(
    model: BackboneConfig, vocab_size: int = 0, embedding: EmbeddingConfig | None = None
) -> None:
    """Raise :class:`MemspanError` if the weights do not fit this machine."""
    if model.n_layers > MOST_LAYERS:
        raise MemspanError(
            f"n_layers must be at most {MOST_LAYERS:,}, not {_shown(model.n_layers)}: lower it"
        )
    if torch.get_default_device().type == "meta":
        # The meta device allocates nothing.
        return
    needed = BYTES * parameters(model, vocab_size, embedding)
    refuse_oversized("the model's weights", needed, torch.get_default_device(), REMEDY)


def refuse_oversized(what: str, needed: int, device: torch.device, remedy: str) -> None:
    """Raise :class:`MemspanError` if ``needed`` bytes exceed the device's memory."""
    available = memory_of(device)
    if needed > available:
        where = "this machine" if device.type == "cpu" else f"the {device.type} device"
        raise MemspanError(
            f"{what} would take at least {_shown(needed // 10**9)} GB, and {where} has "
            f"{available / 1e9:,.1f} GB: {remedy}"
        )


@contextlib.contextmanager
def refuse_impossible(what: str) -> Iterator[None]:
    """Turn torch's own errors about sizes into :class:`MemspanError`; ``what`` is being made."""
    try:
        yield
    except (RuntimeError, OverflowError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise MemspanError(
            f"{what} cannot be made in these sizes ({reason[:120]}): lower them"
        ) from None


def refuse_too_long(error: RuntimeError, x: torch.Tensor) -> None:
    """Raise :class:`MemspanError` if ``error``, in reading ``x [B, T, D]``, is that a CPU's memory ran
    out: attention grows with the square of a segment's length, which not all users know."""
    found = re.search(r"can't allocate memory: .*?(\d+) bytes", str(error))
    if found is not None:
        rows, length = x.shape[:2]
        raise MemspanError(
            f"{counted(rows, 'row')} of {counted(length, 'token')} in one call need more memory than "
            f"there is (torch could not allocate {int(found[1]):,} bytes more): read shorter segments, "
            "each with the memory that the one before returned, or fewer rows"
        ) from error


def parameters(
    model: BackboneConfig, vocab_size: int = 0, embedding: EmbeddingConfig | None = None
) -> int:
    """A lower bound on the number of parameters of backbone and embedding."""
    embedding = embedding or EmbeddingConfig()
    # Clusters after the first may be very narrow, and are not counted.
    full = min(vocab_size, *embedding.cutoffs[:1]) if embedding.cutoffs else vocab_size
    return model.least_parameters() + full * (embedding.d_embed or model.d_model)


def memory_of(device: torch.device) -> float:
    """The device's free memory or, of a CPU, this machine's total, in bytes."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return _machine_memory() if device.type == "cpu" else float("inf")


@functools.cache
def _machine_memory() -> float:
    """Memory in bytes, or the container's limit if that is lower."""
    found = []
    # Windows has no such names.
    if {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= getattr(os, "sysconf_names", {}).keys():
        found.append(float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))
    # A container's limit: control groups version 2, then version 1.
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            found.append(float(Path("/sys/fs/cgroup", limit).read_text()))
        except (OSError, ValueError):
            continue
    # If the system tells nothing, nothing is refused.
    return min(found, default=float("inf"))


def _shown(number: int) -> str:
    return f"{number:,}" if number < 10**15 else "over 10^15"
