"""Run a single token through a stack of pre-norm layers by a step in C."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memspan.native.stack import PackedStack

S = TypeVar("S")


class StepsInC(ABC, Generic[S]):
    """Base of readers that take a single token through the stack by a step in C where that can run: one
    step with the weights' own type, and one for autocast, with weights in bfloat16."""

    @abstractmethod
    def _compiles(self, bf16_weights: bool) -> bool:
        """Check that the step in C supports these options and can run here."""

    @abstractmethod
    def _compiled_step(self, bf16_weights: bool) -> S:
        """The step, with a copy of the weights."""

    def _step_for(self, x: Tensor, dtype: torch.dtype) -> S | None:
        """The step in C for ``x``, if it computes what is asked for: products of the weights' type
        ``dtype`` or, under autocast, with weights in bfloat16."""
        if x.dtype != dtype:
            return None
        if not torch.is_autocast_enabled("cpu"):
            return self._step
        rounded = torch.get_autocast_dtype("cpu") == torch.bfloat16 and x.dtype == torch.float32
        return self._bf16_step if rounded else None

    @cached_property
    def _step(self) -> S | None:
        """Made when the first single token is read."""
        return self._compiled_step(False) if self._compiles(False) else None

    @cached_property
    def _bf16_step(self) -> S | None:
        return self._compiled_step(True) if self._compiles(True) else None


def packed_stack(
    source: Path,
    layers: Iterable[Any],
    projections: Sequence[dict[str, Tensor]],
    final_norm: nn.Module,
    *,
    n_heads: int,
    batch: int,
    mixer: str = "attention",
    bf16_weights: bool = False,
) -> PackedStack:
    """The stack's weights for a step of the C file ``source``; ``bf16_weights``: matrices in bfloat16.

    ``projections``: per layer the tensors ``projections`` and, if there is one, ``projections_bias``.
    ``mixer``: the sub-layer beside ``feed_forward``, whose last product is its ``output``.
    """
    tensors = []
    for layer, own in zip(layers, projections, strict=True):
        norm = getattr(layer, f"{mixer}_norm")
        parts = {"output": getattr(layer, mixer).output, "norm": norm}
        feed_forward = getattr(layer, "feed_forward", None)
        if feed_forward is not None:
            parts |= {
                "inner": feed_forward.inner,
                "outer": feed_forward.outer,
                "inner_norm": layer.feed_forward_norm,
            }
        found = own | {
            f"{name}_{kind}": parameter
            for name, part in parts.items()
            for kind, parameter in part.named_parameters()
        }
        for name in {"output", "inner", "outer"} & parts.keys():
            found[name] = found.pop(f"{name}_weight")
        tensors.append({name: t.detach() for name, t in found.items()})
    return PackedStack(
        source,
        tensors,
        # Not as they are listed: whatever puts a parameter in anew puts it last.
        [final_norm.weight.detach(), final_norm.bias.detach()]
        if isinstance(final_norm, nn.LayerNorm)
        else [],
        n_heads=n_heads,
        batch=batch,
        gelu=feed_forward is not None and feed_forward.activation is F.gelu,
        # A layer may lack the first norm, or the feed-forward sub-layer and its norm.
        norm_epsilon=(norm if feed_forward is None else layer.feed_forward_norm).eps,
        bf16_weights=bf16_weights,
    )
