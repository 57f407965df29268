"""Weights of transformers' gated-delta layers as :class:`GatedDeltaRule`'s, and back.

Both compute the same; only names differ, and which products are one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from memspan.errors import MemspanError
from memspan.models.gated_delta_net.config import GatedDeltaNetConfig
from memspan.models.gated_delta_net.layer import GatedDeltaRule

Tensors = Mapping[str, Tensor]


_QWEN_3_5 = {
    "in_proj_qkv": ("query", "key", "value"),
    "in_proj_z": ("output_gate",),
    "in_proj_b": ("beta",),
    "in_proj_a": ("step",),
    "norm": ("norm",),
    "out_proj": ("output",),
}
_LAYOUTS: dict[str, dict[str, tuple[str, ...]]] = {
    "Qwen3NextGatedDeltaNet": {
        "in_proj_qkvz": ("query", "key", "value", "output_gate"),
        "in_proj_ba": ("beta", "step"),
        "norm": ("norm",),
        "out_proj": ("output",),
    },
    "Qwen3_5GatedDeltaNet": _QWEN_3_5,
    "Qwen3_5MoeGatedDeltaNet": _QWEN_3_5,
    "OlmoHybridGatedDeltaNet": {
        "q_proj": ("query",),
        "k_proj": ("key",),
        "v_proj": ("value",),
        "a_proj": ("step",),
        "b_proj": ("beta",),
        "g_proj": ("output_gate",),
        "o_norm": ("norm",),
        "o_proj": ("output",),
    },
}
"""For each module of a class of layers, those of ours whose rows it holds, in order."""
_BY_KEY_HEAD = ("Qwen3NextGatedDeltaNet",)
"""Classes that hold them in that order for each head of keys, not for all heads together."""
_SAME = ("A_log", "dt_bias")


def to_gated_delta_rule(layer: nn.Module) -> GatedDeltaRule:
    """A layer of ours with copies of the weights of one of transformers.

    Args:
        layer: of Qwen3-Next, Qwen3.5 or OLMo Hybrid.

    Returns:
        A layer that computes the same, on the same device and of the same type.

    Raises:
        MemspanError: the layer is of another kind, or has other parts or options.
    """
    rule = _empty(layer)
    rule.load_state_dict(to_our_names(layer, layer.state_dict()), assign=True)
    for parameter in rule.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    return rule


@torch.no_grad()
def from_gated_delta_rule(rule: GatedDeltaRule, layer: nn.Module) -> None:
    """Copy the weights of a layer of ours into one of transformers, which then computes the same.

    Raises:
        MemspanError: the layer is of another kind, has other parts, or other sizes and options than
            ours. Then nothing is copied.
    """
    expected = _empty(layer)
    for what, ours, theirs in (
        *((n, getattr(rule.config, n), getattr(expected.config, n)) for n in _OPTIONS),
        ("the epsilon of its norm", rule.norm.eps, expected.norm.eps),
    ):
        if ours != theirs:
            raise MemspanError(
                f"{type(layer).__name__} has {theirs} as {what}, and our layer {ours}: make one with "
                "the same"
            )
    ours = rule.state_dict()
    for name, view in _views(layer, layer.state_dict()).items():
        view.copy_(ours[name].reshape(view.shape))


def to_our_names(layer: nn.Module, tensors: Tensors) -> dict[str, Tensor]:
    """A layer's tensors, weights or gradients, under the names and in the shapes of ours."""
    ours = _empty(layer).state_dict()
    return {n: view.reshape(ours[n].shape) for n, view in _views(layer, tensors).items()}


def _views(layer: Any, tensors: Tensors) -> dict[str, Tensor]:
    """Views of a layer's tensors under our names, by heads of keys if it holds several that way."""
    sizes = {name: len(t) for name, t in _empty(layer).state_dict().items()}
    groups = layer.num_k_heads if type(layer).__name__ in _BY_KEY_HEAD else 1
    views = {name: tensors[name] for name in _SAME} | {"convolution": tensors["conv1d.weight"]}
    for their_name, names in _LAYOUTS[type(layer).__name__].items():
        whole = tensors[f"{their_name}.weight"]
        ours = [f"{name}.weight" for name in names]
        if len(ours) > 1:
            parts = whole.unflatten(0, (groups, -1)).split([sizes[n] // groups for n in ours], 1)
            views |= zip(ours, parts, strict=True)
        else:
            views[ours[0]] = whole
    return views


_OPTIONS = (
    "d_model", "n_heads", "value_heads", "head_width", "value_width", "convolution",
    "negative_eigenvalues",
)  # fmt: skip


def _empty(layer: Any) -> GatedDeltaRule:
    """A layer of ours of the same sizes and options, without weights."""
    kind = type(layer).__name__
    if kind not in _LAYOUTS:
        raise MemspanError(
            f"{kind} is not a layer that can be converted; these are {', '.join(_LAYOUTS)}"
        )
    layout = _LAYOUTS[kind]
    known = {*_SAME, "conv1d.weight", *(f"{name}.weight" for name in layout)}
    other = {name for name, _ in layer.named_parameters()} ^ known
    if other:
        raise MemspanError(
            f"parameters of this {kind} are not those that are known, as {sorted(other)[0]!r}: merge "
            "adapters, or undo what changed it"
        )
    if layer.activation not in ("silu", "swish"):
        raise MemspanError(
            f"the convolutions of this {kind} are followed by {layer.activation}, ours by silu: it "
            "cannot be converted"
        )
    config = GatedDeltaNetConfig(
        n_layers=1,
        d_model=layer.hidden_size,
        n_heads=layer.num_k_heads,
        n_value_heads=layer.num_v_heads,
        d_head=layer.head_k_dim,
        d_value=layer.head_v_dim,
        convolution=layer.conv_kernel_size,
        negative_eigenvalues=getattr(layer, "allow_neg_eigval", False),
    )
    with torch.device("meta"):
        rule = GatedDeltaRule(config)
    (norm,) = (name for name, ours in layout.items() if ours == ("norm",))
    rule.norm.eps = getattr(layer, norm).variance_epsilon
    return rule
