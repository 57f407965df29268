"""Models of labml_nn, the oracle of golden tests, as ours: options and tensors from recordings.

labml_nn: github.com/labmlai/annotated_deep_learning_paper_implementations.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from golden import Golden
from memspan.lab.converters.convert import Checkpoint
from memspan.lab.converters.names import Get, Names, Rows, module, upside_down, whole
from memspan.lab.converters.vocabulary import numbers
from memspan.lab.runs.options import RunConfig
from memspan.models import LanguageModel
from memspan.models.compressive.config import CompressiveConfig
from memspan.models.fast_weights.config import FastWeightsConfig
from memspan.models.feedback.config import FeedbackConfig
from memspan.models.options import BackboneConfig, EmbeddingConfig
from memspan.models.transformer_xl.config import TransformerXLConfig

FIRST = "transformer.layers.0"
SIGNS = {
    f"{FIRST}.compress.conv.weight": "compressive",
    f"{FIRST}.self_attn.key_pos_embeddings": "transformer-xl",
    f"{FIRST}.attn.interpolation_weight.0.linear.weight": "fast-weights",
    "transformer.weights": "feedback",
}
"""Our architecture by a tensor that identifies it, the first that is there."""


def read(g: Golden) -> Checkpoint:
    """A recorded model as a checkpoint that is converted."""
    tensors = _tensors(g)
    architecture = next(SIGNS[sign] for sign in SIGNS if sign in tensors)
    # A norm that their Fast Weights layers have and never use.
    if architecture == "fast-weights":
        tensors = {n: t for n, t in tensors.items() if ".norm_self_attn." not in n}
    config = RunConfig(
        model=_model(architecture, g.config, tensors),
        architecture=architecture,
        embedding=EmbeddingConfig(tie=False, scale=False),
    )
    tokenizer, _ = numbers(len(tensors["src_embed.weight"]), "")
    own = partial(names, p=max(_rows(tensors, ".key_pos_embeddings") // 2, 1))
    return Checkpoint(config, tokenizer, tensors, own, Path("the recording"))


def _tensors(g: Golden) -> dict[str, Tensor]:
    """The tensors of their ``AutoregressiveModel``; some sets recorded its transformer only."""
    tensors = {name: tensor.cpu() for name, tensor in g.named("param.")}
    if "src_embed.weight" in tensors:
        return tensors
    rows = torch.linspace(-1, 1, 7 * g.config["d_model"]).view(7, -1)
    made = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    made |= {"src_embed.weight": rows, "generator.weight": rows.flip(0)}
    return made | {"generator.bias": torch.zeros(7)}


def _model(
    architecture: str, options: dict[str, Any], tensors: dict[str, Tensor]
) -> BackboneConfig:
    """The model's options; its sizes follow from the tensors."""
    layers = {name.split(".")[2] for name in tensors if name.startswith("transformer.layers.")}
    table = _rows(tensors, ".key_pos_embeddings")
    common: dict[str, Any] = {
        "n_layers": len(layers),
        "d_model": tensors["src_embed.weight"].shape[1],
        "n_heads": _rows(tensors, ".query_pos_bias") or _rows(tensors, "_weight.0.linear.weight"),
        "d_ff": len(tensors[f"{FIRST}.feed_forward.layer1.weight"]),
        "dropout": 0.1,
    }
    if architecture == "fast-weights":
        return FastWeightsConfig(**common, epsilon=1e-6, norm="feed-forward")
    common |= {"attention_dropout": 0.1, "attention_bias": True}
    if architecture == "feedback":
        shared = "transformer.key.linear.weight" in tensors
        return FeedbackConfig(
            **common,
            # They see all that was read in a call, which in training was a segment.
            memory_length=min(options.get("seq_len", 12), table),
            max_distance=table,
            projections="shared" if shared else "per-layer",
            memory_norm=False,
            # Where keys and values are shared, its values have no bias.
            value_bias=not shared,
        )
    common |= {
        "memory_length": options["mem_len"],
        "positions": "learned",
        "max_distance": table // 2 + 1,
    }
    if architecture == "transformer-xl":
        return TransformerXLConfig(**common)
    return CompressiveConfig(
        **common,
        compressed_length=options["c_mem_len"],
        compression_rate=tensors[f"{FIRST}.compress.conv.weight"].shape[2],
    )


def _rows(tensors: dict[str, Tensor], ending: str) -> int:
    """The rows of the first tensor whose name ends so; 0 without one."""
    found = [tensor.shape for name, tensor in tensors.items() if name.endswith(ending)]
    return found[0][0] if found and found[0] else 0


FEED_FORWARD = {
    "norm_ff": "feed_forward_norm",
    "feed_forward.layer1": "feed_forward.inner",
    "feed_forward.layer2": "feed_forward.outer",
}
RELATIVE = FEED_FORWARD | {
    "norm_self_attn": "attention_norm",
    "self_attn.query.linear": "attention.query",
    "self_attn.key.linear": "attention.key",
    "self_attn.value.linear": "attention.value",
    "self_attn.output": "attention.output",
}
MODULES: dict[type, dict[str, str]] = {
    TransformerXLConfig: RELATIVE,
    CompressiveConfig: RELATIVE | {"compress.conv": "attention.compression"},
    FeedbackConfig: FEED_FORWARD
    | {"norm_self_attn": "attention_norm", "attn.query.linear": "query", "attn.output": "output"},
    FastWeightsConfig: FEED_FORWARD
    | {
        "attn.query.linear": "attention.query",
        "attn.key.linear": "attention.key",
        "attn.value.linear": "attention.value",
        "attn.interpolation_weight.0.linear": "attention.beta",
        "attn.output": "attention.output",
    },
}
"""By our options: the modules of each of their layers, and ours."""


def distance_table(table: Tensor, p: int) -> Rows:
    """Their ``2P`` rows, row ``P - distance``; ours has none for the future, which are zero."""

    def rows(get: Get) -> list[Tensor]:
        past = [get(table)[d : d + 1] for d in range(p, -1, -1)]
        return [*past, get(table).new_zeros(p - 1, *table.shape[1:])]

    return rows


def names(model: LanguageModel, p: int) -> Names:
    """labml's names of tensors in terms of ``model``.

    ``p``: half the rows of a position table of its Transformer-XL and Compressive Transformer.
    """
    backbone: Any = model.backbone
    rows = {
        "src_embed.weight": whole(model.embedding.tables[0]),
        "generator.weight": whole(model.head.tables[0]),
        "generator.bias": whole(model.head.biases[0]),
        **module("transformer.norm", backbone.final_norm),
    }
    kind = type(backbone.config)
    for n, layer in enumerate(backbone.stack()):
        here = f"transformer.layers.{n}"
        for theirs, ours in MODULES[kind].items():
            rows |= module(f"{here}.{theirs}", layer.get_submodule(ours))
        if kind is FeedbackConfig:
            rows[f"{here}.attn.query_pos_bias"] = whole(layer.content_bias)
            # Their tables begin with the farthest.
            rows[f"{here}.attn.key_pos_embeddings"] = upside_down(layer.position_keys)
            rows[f"{here}.attn.key_pos_bias"] = upside_down(layer.position_scores)
        elif kind is not FastWeightsConfig:
            own = layer.attention
            rows[f"{here}.self_attn.query_pos_bias"] = whole(own.content_bias)
            rows[f"{here}.self_attn.key_pos_embeddings"] = distance_table(own.position_keys, p)
            rows[f"{here}.self_attn.key_pos_bias"] = distance_table(own.position_scores, p)
    if kind is FeedbackConfig:
        rows["transformer.weights"] = whole(backbone.layer_weights)
        shared = backbone.config.projections == "shared"
        for n, (key, value) in enumerate(zip(backbone.key, backbone.value, strict=True)):
            there = "transformer" if shared else f"transformer.layers.{n}.attn"
            rows |= module(f"{there}.key.linear", key) | module(f"{there}.value.linear", value)
    return rows
