"""What a model takes at least, and what there is: sizes that no machine holds are refused at once.

A model that is a little too large still fails where it runs out of memory. This is about the zeros too
many, which would otherwise take minutes and all of a machine's memory before they are an error.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from memspan.errors import MemspanError
from memspan.models.options import BackboneConfig, EmbeddingConfig

MOST_LAYERS = 10_000
"""Each takes a millisecond to make, however narrow."""
BYTES = 4
"""Of a number in float32."""
REMEDY = (
    "lower n_layers, d_model, d_ff, n_heads, d_head, the vocabulary, max_distance or memory_length"
)


def refuse_oversized_model(
    model: BackboneConfig, vocab_size: int = 0, embedding: EmbeddingConfig | None = None
) -> None:
    """Raise :class:`MemspanError` if the weights do not fit this machine."""
    if torch.get_default_device().type == "meta":
        # Shapes alone, which take nothing.
        return
    if model.n_layers > MOST_LAYERS:
        raise MemspanError(
            f"n_layers must be at most {MOST_LAYERS:,}, not {_shown(model.n_layers)}: lower it"
        )
    needed = BYTES * parameters(model, vocab_size, embedding)
    refuse_oversized("the model's weights", needed, torch.get_default_device(), REMEDY)


def refuse_oversized(what: str, needed: int, device: torch.device, remedy: str) -> None:
    """Raise :class:`MemspanError` if ``needed`` bytes are more than the device has."""
    there = memory_of(device)
    if needed > there:
        where = "this machine" if device.type == "cpu" else f"the {device.type} device"
        raise MemspanError(
            f"{what} would take at least {_shown(needed // 10**9)} GB, and {where} has "
            f"{there / 1e9:,.1f} GB: {remedy}"
        )


@contextlib.contextmanager
def refuse_impossible(what: str) -> Iterator[None]:
    """Raise :class:`MemspanError` for a size that torch refuses with some error of its own."""
    try:
        yield
    except (RuntimeError, OverflowError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise MemspanError(
            f"{what} cannot be made in these sizes ({reason[:120]}): lower them"
        ) from None


def parameters(
    model: BackboneConfig, vocab_size: int = 0, embedding: EmbeddingConfig | None = None
) -> int:
    """Parameters at least: the backbone's and the embedding's."""
    embedding = embedding or EmbeddingConfig()
    # Clusters after the first may be next to nothing.
    full = min(vocab_size, *embedding.cutoffs[:1]) if embedding.cutoffs else vocab_size
    return model.least_parameters() + full * (embedding.d_embed or model.d_model)


def memory_of(device: torch.device) -> float:
    """Bytes of memory that could be had at best."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return _machine_memory() if device.type == "cpu" else float("inf")


@functools.cache
def _machine_memory() -> float:
    """Memory and swap, or what this process may have of them."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)}
        found.append(1024.0 * (sizes["MemTotal"] + sizes["SwapTotal"]))
    except (OSError, KeyError, ValueError):
        if {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= os.sysconf_names.keys():
            found.append(float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))
    # A container's own limit: of control groups, second and first version.
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            found.append(float(Path("/sys/fs/cgroup", limit).read_text()))
        except (OSError, ValueError):
            continue
    # Where nothing is known, nothing is refused.
    return min(found, default=float("inf"))


def _shown(number: int) -> str:
    return f"{number:,}" if number < 10**15 else "over 10^15"
