"""The limit of fast paths: ``backward()`` once. Anything else is refused, never silently wrong.

A backward pass written by hand has no derivative of its own. Where a graph of it is asked for
(``create_graph=True``), it raises before it computes anything: an error that waited in that graph could
be pruned from it, or never be recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function, forward_ad

from memspan.errors import MemspanError
from memspan.ops.implementations import without_autocast

TRANSFORMS = "transforms of torch.func and forward mode"
Gradients = tuple[Tensor | None, ...]
Backward = Callable[..., Gradients]


def first_derivatives_only(backward: Backward) -> Backward:
    """Decorate the ``backward`` of an autograd function: it raises :class:`MemspanError` where a graph
    of it or a batch of gradients is asked for. It is not subject to autocast, whatever it is called
    under."""

    @wraps(backward)
    def once(ctx: Any, *upstream: Tensor | None) -> Gradients:
        # Autograd may pass none at all, as gradcheck does.
        some = next((g for g in upstream if g is not None), None)
        exact = nullcontext() if some is None else without_autocast(some)
        if torch.compiler.is_compiling():
            # Its own autograd has first derivatives only, and records them unless told otherwise.
            with torch.no_grad(), exact:
                return backward(ctx, *upstream)
        _refuse_a_graph(upstream)
        with exact:
            return backward(ctx, *upstream)

    return once


def apply(function: type[Function], *given: Any) -> Any:
    """``function.apply(*given)``, after :func:`refuse_transforms`."""
    refuse_transforms(*given)
    return function.apply(*given)


def refuse_transforms(*given: Any) -> None:
    """Raise :class:`MemspanError` within a transform of ``torch.func``, or where one of the tensors has
    a tangent of forward mode."""
    if not torch.compiler.is_compiling() and is_transformed(*given):
        raise MemspanError(without(TRANSFORMS))


def is_transformed(*given: Any) -> bool:
    """True within a transform of ``torch.func``, and where one of the tensors has a tangent of forward
    mode."""
    if torch._C._are_functorch_transforms_active():
        return True
    return forward_ad._current_level >= 0 and any(map(_has_tangent, given))


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float = 0.0) -> Tensor:
    """Torch's ``scaled_dot_product_attention``: its fused kernels also have first derivatives only."""
    y = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    node = None if torch.compiler.is_compiling() else y.grad_fn
    # Its plain form is made of several functions, the last of which is another.
    if node is not None and node.name().startswith("ScaledDotProduct"):
        node.register_prehook(_refuse_a_graph)
    return y


def _refuse_a_graph(upstream: Gradients) -> None:
    if torch._C._are_functorch_transforms_active():
        raise MemspanError(without(TRANSFORMS))
    if torch.is_grad_enabled():
        raise MemspanError(without("gradients of gradients (create_graph=True)"))
    if any(g is not None and _is_batched(g) for g in upstream):
        raise MemspanError(without("batches of gradients (is_grads_batched, vectorize)"))


def _is_batched(x: Tensor) -> bool:
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(x) or functorch.is_legacy_batchedtensor(x)


def _has_tangent(x: object) -> bool:
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None


def without(what: str) -> str:
    """The message that names ``what`` fast implementations do not have, and the remedy."""
    return (
        f"fast implementations have no {what}: pass implementation='reference' to the operation or the "
        "model, or call DPFP(...).reference in place of dpfp"
    )
