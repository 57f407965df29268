"""What kernels know of the stacks of Transformer-XL and the Compressive Transformer."""

from __future__ import annotations

from torch import nn

from memspan.models.packing import (
    Schema,
    dropout,
    feed_forward,
    layer_norm,
    linear,
    module_list,
)
from memspan.models.protocol import M
from memspan.models.relative.backbone import RelativeBackbone
from memspan.models.relative.gate import GRUGate
from memspan.models.relative.options import RelativeConfig
from memspan.models.relative.self_attention import (
    RelativeLayer,
    RelativeSelfAttention,
    learned_rows,
)


def layer_schema(
    kind: type[RelativeLayer], config: RelativeConfig, epsilon: float, **more: Schema
) -> Schema:
    """Of a layer of this ``kind`` with these norms' epsilon; ``more``: its other modules."""
    d, heads = config.d_model, (config.n_heads, config.head_width)
    inner, rows, bias = heads[0] * heads[1], learned_rows(config), config.attention_bias
    tables = {"position_keys": (rows, *heads), "position_scores": (rows, heads[0])} if rows else {}
    products = {
        "query": linear(d, inner, bias=False),
        "key": linear(d, inner, bias=False),
        "value": linear(d, inner, bias),
        "output": linear(inner, d, bias),
    }
    if not rows:
        products["position"] = linear(d, inner, bias=False)
    if config.gating == "gru":
        more |= {"attention_gate": _gate(d), "feed_forward_gate": _gate(d)}
    return Schema(
        kind,
        attributes={"pre": config.normalisation == "pre"},
        modules={
            "attention": Schema(
                RelativeSelfAttention,
                tables,
                {"n_heads": heads[0], "head_width": heads[1]},
                products,
            ),
            "feed_forward": feed_forward(d, config.d_ff, config.activation, config.dropout),
            "attention_norm": layer_norm(d, epsilon),
            "feed_forward_norm": layer_norm(d, epsilon),
            "dropout": dropout(config.dropout),
            **more,
        },
    )


def backbone_schema(
    kind: type[RelativeBackbone[M]], config: RelativeConfig, layer: Schema, epsilon: float
) -> Schema:
    """Of a stack of this ``kind`` with layers like ``layer``."""
    sets = 1 if config.tie_position_biases else config.n_layers
    names = ("content_bias", "position_bias")[: 1 + (config.positions == "sinusoidal")]
    normalises = config.normalisation == "pre" and config.final_norm
    return Schema(
        kind,
        {name: (sets, config.n_heads, config.head_width) for name in names},
        {"config": config},
        {
            "dropout": dropout(config.dropout),
            "layers": module_list([layer] * config.n_layers),
            "final_norm": layer_norm(config.d_model, epsilon)
            if normalises
            else Schema(nn.Identity),
        },
    )


def _gate(d_model: int) -> Schema:
    """A :class:`GRUGate` of this width."""
    products = {"of_branch": 3, "of_stream": 2, "of_reset_stream": 1}
    return Schema(
        GRUGate,
        {"bias": (d_model,)},
        modules={name: linear(d_model, n * d_model, bias=False) for name, n in products.items()},
    )
