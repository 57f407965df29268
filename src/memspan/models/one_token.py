"""What steps in C that take one token through a stack of pre-norm layers need of its modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memspan.nn import FeedForward
from memspan.ops.native.stack import PackedStack


class Layer(Protocol):
    """A layer of a stack: two norms, of which the first may be an identity, and two sub-layers."""

    @property
    def attention(self) -> Any:
        """With its last product as ``output``."""

    def modules(self) -> Iterator[nn.Module]:
        """The layer and all that it consists of."""

    @property
    def feed_forward(self) -> FeedForward:
        """Without dropout."""

    @property
    def attention_norm(self) -> nn.Module:
        """Before the attention."""

    @property
    def feed_forward_norm(self) -> Any:
        """Before the feed-forward sub-layer; its epsilon is that of all norms."""


def is_plain(layers: Iterable[Layer], final_norm: nn.Module) -> bool:
    """Whether a step in C can compute what these modules do: they are torch's own, so that weights and
    biases are all there is to them, and alike in all layers. Not where an adapter, a parametrisation
    or a norm without gain or bias has taken the place of one."""
    layers = list(layers)
    if any(type(layer.feed_forward) is not FeedForward for layer in layers):
        return False
    products = [
        (layer.attention.output, layer.feed_forward.inner, layer.feed_forward.outer)
        for layer in layers
    ]
    norms = [layer.feed_forward_norm for layer in layers]
    may_lack = [layer.attention_norm for layer in layers] + [final_norm]
    norms += [norm for norm in may_lack if type(norm) is not nn.Identity]
    if not all(_is_affine(part, nn.Linear) for parts in products for part in parts):
        return False
    if not all(_is_affine(norm, nn.LayerNorm) and norm.bias is not None for norm in norms):
        return False
    sizes = {tuple(part.weight.shape for part in parts) for parts in products}
    activations = {layer.feed_forward.activation for layer in layers}
    return len(sizes) == len({norm.eps for norm in norms}) == len(
        activations
    ) == 1 and activations <= {torch.relu_, F.gelu}


def _is_affine(part: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether ``part`` is a ``kind`` with a weight, perhaps a bias, and nothing else. Quantised weights
    are no parameters of torch's own; some libraries replace a module's ``forward``."""
    parameters = dict(part.named_parameters())
    return (
        type(part) is kind
        and "forward" not in vars(part)
        and {"weight"} <= parameters.keys() <= {"weight", "bias"}
        and all(type(parameter) is nn.Parameter for parameter in parameters.values())
    )


def hooks(layers: Iterable[Layer], final_norm: nn.Module) -> list[dict[int, Any]]:
    """The tables of hooks of all modules. As long as ``any`` finds none filled, nothing is lost where a
    step in C does not call them; looking takes a microsecond per token."""
    modules = [*(part for layer in layers for part in layer.modules()), final_norm]
    return [t for part in modules for t in (part._forward_pre_hooks, part._forward_hooks)]


def packed_stack(
    source: Path,
    layers: Iterable[Layer],
    projections: Sequence[dict[str, Tensor]],
    final_norm: nn.Module,
    *,
    n_heads: int,
    batch: int,
) -> PackedStack:
    """The stack's weights for the ``step`` of the C file ``source``.

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
        [p.detach() for p in final_norm.parameters()],
        n_heads=n_heads,
        batch=batch,
        gelu=layer.feed_forward.activation is F.gelu,
        norm_epsilon=layer.feed_forward_norm.eps,
    )
