"""Whether modules do no more than their weights say, so that these alone may be computed with: several
products as one, or a loop in C. Not where an adapter, a parametrisation or a norm without gain or bias
has taken the place of a module, nor where hooks are to be called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import NoneType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memspan.nn import FeedForward


def is_affine(part: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether ``part`` is a ``kind`` with a weight, perhaps a bias, and nothing else. Quantised weights
    are of a type of their own."""
    own = part._parameters
    return (
        type(part) is kind
        and not are_patched([part])
        and not part._modules
        and own.keys() <= {"weight", "bias"}
        # A plain tensor within torch.func.functional_call.
        and type(own.get("weight")) in (nn.Parameter, Tensor)
        and type(own.get("bias")) in (nn.Parameter, Tensor, NoneType)
    )


def has_bias(part: nn.Module) -> bool:
    """Of an affine one. Its type does not say: ``nn.Linear`` names none where it has none."""
    return part._parameters["bias"] is not None


def are_plain(
    products: Iterable[Sequence[nn.Module]],
    norms: Iterable[nn.Module],
    feed_forwards: Sequence[nn.Module],
) -> bool:
    """Whether these parts of a stack are torch's own and memspan's, and alike in all layers.

    ``products``: those of attention, layer by layer. ``norms``: with gain and bias.
    """
    if any(type(part) is not FeedForward for part in feed_forwards) or are_patched(feed_forwards):
        return False
    if any(type(part.dropout) not in (nn.Identity, nn.Dropout) for part in feed_forwards):
        return False
    by_layer: list[tuple[Any, ...]] = [
        (*attention, fed.inner, fed.outer)
        for attention, fed in zip(products, feed_forwards, strict=True)
    ]
    if not all(is_affine(part, nn.Linear) for parts in by_layer for part in parts):
        return False
    norms = list(norms)
    if not all(is_affine(norm, nn.LayerNorm) and has_bias(norm) for norm in norms):
        return False
    sizes = {tuple(part.weight.shape for part in parts) for parts in by_layer}
    activations = {fed.activation for fed in feed_forwards}
    alike = len(sizes) == len({norm.eps for norm in norms}) == len(activations) == 1
    return alike and activations <= {torch.relu_, F.gelu}


def are_patched(parts: Iterable[nn.Module]) -> bool:
    """Whether the ``forward`` of one of ``parts`` was replaced, as some libraries do."""
    return any("forward" in vars(part) for part in parts)


def hooks(parts: Iterable[nn.Module]) -> list[dict[int, Any]]:
    """The tables of hooks of ``parts``. As long as ``any`` finds none filled, nothing is lost where
    these are not called. Looking takes some microseconds for a whole stack. Torch's global hooks are
    not among them."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return [getattr(part, name) for part in parts for name in names]


def are_products(parts: Iterable[nn.Module]) -> bool:
    """Whether ``parts`` are products with their weights, and no hooks are to be called."""
    parts = list(parts)
    return all(is_affine(part, nn.Linear) for part in parts) and not any(hooks(parts))
