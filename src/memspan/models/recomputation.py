"""Activation checkpointing (Chen et al. 2016, arXiv 1604.06174): keep less for backward, and compute it
again there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.utils.checkpoint import checkpoint

R = TypeVar("R")


def recomputed(part: Callable[..., R], *arguments: Any) -> R:
    """``part(*arguments)``, of which only the arguments are kept for backward, where it runs again.

    It runs with the same random numbers and under the same autocast, and the graph is that of a plain
    call: outputs and gradients are the same bit for bit. ``part`` must change nothing that it is given.
    """
    if not torch.is_grad_enabled():
        return part(*arguments)
    return cast(R, checkpoint(part, *arguments, use_reentrant=False))
