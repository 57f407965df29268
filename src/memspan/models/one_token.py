"""What steps in C that take one token through a stack of pre-norm layers need of its modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from memspan.nn import FeedForward
from memspan.ops.native.stack import PackedStack


class Layer(Protocol):
    """A layer of a stack: two norms, of which the first may be an identity, and two sub-layers."""

    @property
    def attention(self) -> Any:
        """With its last product as ``output``."""

    @property
    def feed_forward(self) -> FeedForward:
        """Without dropout."""

    @property
    def attention_norm(self) -> nn.Module:
        """Before the attention."""

    @property
    def feed_forward_norm(self) -> Any:
        """Before the feed-forward sub-layer; its epsilon is that of all norms."""


def packed_stack(
    source: Path,
    layers: Iterable[Layer],
    projections: Sequence[dict[str, Tensor]],
    final_norm: nn.Module,
    *,
    n_heads: int,
    batch: int,
    halved: bool = False,
) -> PackedStack:
    """The stack's weights for the ``step`` of the C file ``source``; ``halved``: matrices in bfloat16.

    ``projections``: per layer the tensors ``projections`` and, if there is one, ``projections_bias``,
    of which the architecture says what they are.
    """
    tensors = []
    for layer, own in zip(layers, projections, strict=True):
        parts = {
            "output": layer.attention.output,
            "inner": layer.feed_forward.inner,
            "outer": layer.feed_forward.outer,
            "norm": layer.attention_norm,
            "inner_norm": layer.feed_forward_norm,
        }
        found = own | {
            f"{name}_{kind}": parameter
            for name, part in parts.items()
            for kind, parameter in part.named_parameters()
        }
        for name in ("output", "inner", "outer"):
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
        gelu=layer.feed_forward.activation is F.gelu,
        norm_epsilon=layer.feed_forward_norm.eps,
        halved=halved,
    )
