"""labml_nn's names of tensors in terms of ours: Transformer-XL, Compressive, Feedback, Fast Weights."""

from __future__ import annotations

from typing import Any

from memspan.converters.names import Names, distance_table, item, linear, one, upside_down
from memspan.models import LanguageModel
from memspan.models.compressive.model import Compressive
from memspan.models.feedback.model import Feedback
from memspan.models.transformer_xl.model import TransformerXL


def names(model: LanguageModel, p: int) -> Names:
    """labml's names in terms of ``model``.

    ``p``: half the rows of a position table of its Transformer-XL and Compressive Transformer.
    """
    backbone: Any = model.backbone
    rows = {
        "src_embed.weight": one(model.embedding.tables[0]),
        "generator.weight": one(model.head.tables[0]),
        "generator.bias": one(model.head.biases[0]),
        **linear("transformer.norm", backbone.final_norm),
    }
    for n, layer in enumerate(backbone.stack()):
        here = f"transformer.layers.{n}"
        rows |= linear(f"{here}.norm_ff", layer.feed_forward_norm)
        rows |= linear(f"{here}.feed_forward.layer1", layer.feed_forward.inner)
        rows |= linear(f"{here}.feed_forward.layer2", layer.feed_forward.outer)
    if isinstance(backbone, TransformerXL | Compressive):
        return rows | _relative(backbone, p)
    return rows | (_of_feedback(backbone) if isinstance(backbone, Feedback) else _fast(backbone))


def _relative(backbone: TransformerXL | Compressive, p: int) -> Names:
    rows: Names = {}
    for n, layer in enumerate(backbone.stack()):
        attention, here = layer.attention, f"transformer.layers.{n}"
        rows |= linear(f"{here}.norm_self_attn", layer.attention_norm)
        rows[f"{here}.self_attn.query.linear.weight"] = one(attention.query.weight)
        rows[f"{here}.self_attn.key.linear.weight"] = one(attention.key.weight)
        rows |= linear(f"{here}.self_attn.value.linear", attention.value)
        rows |= linear(f"{here}.self_attn.output", attention.output)
        rows[f"{here}.self_attn.query_pos_bias"] = item(backbone.content_bias, n)
        rows[f"{here}.self_attn.key_pos_embeddings"] = distance_table(attention.position_keys, p)
        rows[f"{here}.self_attn.key_pos_bias"] = distance_table(attention.position_scores, p)
        if getattr(layer, "compression", None) is not None:
            rows |= linear(f"{here}.compress.conv", layer.compression)
    return rows


def _of_feedback(backbone: Any) -> Names:
    shared = backbone.config.projections == "shared"
    rows: Names = {"transformer.weights": one(backbone.layer_weights)}
    for n, layer in enumerate(backbone.stack()):
        here = f"transformer.layers.{n}"
        rows |= linear(f"{here}.norm_self_attn", layer.attention_norm)
        rows |= linear(f"{here}.attn.output", layer.output)
        rows[f"{here}.attn.query.linear.weight"] = one(layer.query.weight)
        rows[f"{here}.attn.query_pos_bias"] = one(layer.content_bias)
        # Their tables begin with the farthest.
        rows[f"{here}.attn.key_pos_embeddings"] = upside_down(layer.position_keys)
        rows[f"{here}.attn.key_pos_bias"] = upside_down(layer.position_scores)
    for n in range(1 if shared else len(backbone.layers)):
        there = "transformer." if shared else f"transformer.layers.{n}.attn."
        rows[f"{there}key.linear.weight"] = one(backbone.key[n].weight)
        rows[f"{there}value.linear.weight"] = one(backbone.value[n].weight)
        if not shared:
            rows[f"{there}value.linear.bias"] = one(backbone.value[n].bias)
    return rows


def _fast(backbone: Any) -> Names:
    rows: Names = {}
    for n, layer in enumerate(backbone.stack()):
        attention, here = layer.attention, f"transformer.layers.{n}.attn"
        rows[f"{here}.query.linear.weight"] = one(attention.query.weight)
        rows[f"{here}.key.linear.weight"] = one(attention.key.weight)
        rows[f"{here}.value.linear.weight"] = one(attention.value.weight)
        rows[f"{here}.interpolation_weight.0.linear.weight"] = one(attention.beta.weight)
        rows |= linear(f"{here}.output", attention.output)
    return rows
