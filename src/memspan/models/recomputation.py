"""Activation checkpointing (Chen et al. 2016, arXiv 1604.06174): less is kept for backward, which
computes it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

R = TypeVar("R")


def recomputed(part: Callable[..., R], *arguments: Any) -> R:
    """``part(*arguments)``, of which only the arguments are kept for backward, where it runs again.

    It runs with the same random numbers and under the same autocast, and the graph is that of a plain
    call: outputs and gradients are the same bit for bit. ``part`` must change nothing that it is given.
    """
    if not torch.is_grad_enabled():
        return part(*arguments)
    if isinstance(part, nn.Module) and (buffers := dict(part.named_buffers())):
        # Those of now: before this backward the next pass may put others there, as FAVOR+'s does.
        return _checkpointed(_with_buffers, part, buffers, arguments)
    return _checkpointed(part, *arguments)


def _checkpointed(part: Callable[..., Any], *arguments: Any) -> Any:
    return checkpoint(part, *arguments, use_reentrant=False)


def _with_buffers(module: nn.Module, buffers: dict[str, Tensor], arguments: Any) -> Any:
    return functional_call(module, buffers, arguments)
