"""Runs of labml_nn (github.com/labmlai/annotated_deep_learning_paper_implementations).

labml keeps a run's options in ``configs.yaml`` and each checkpoint in ``checkpoints/STEP``, where
``info.json`` names the files of the tensors: one ``.npy`` for each or, in later versions, one ``.pth``.
It does not save a vocabulary: tokens are the sorted characters of the text, which must be put there.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memspan.converters.convert import Checkpoint
from memspan.converters.names import Names, distance_table, item, module, upside_down, whole
from memspan.converters.options import Options
from memspan.converters.tensors import load_tensors, read_json, shape_of
from memspan.converters.vocabulary import numbers
from memspan.data.options import DataConfig
from memspan.data.tokenizers.base import Tokenizer
from memspan.data.tokenizers.plain import CharacterTokenizer
from memspan.errors import MemspanError
from memspan.files.disk import open_regular, read_limited
from memspan.models import LanguageModel
from memspan.models.compressive.config import CompressiveConfig
from memspan.models.fast_weights.config import FastWeightsConfig
from memspan.models.feedback.config import FeedbackConfig
from memspan.models.options import BackboneConfig, EmbeddingConfig
from memspan.models.transformer_xl.config import TransformerXLConfig
from memspan.runs.options import RunConfig

LIMIT = 1 << 20
"""Maximum size of ``configs.yaml`` in bytes."""
TEXT = "text.txt"
"""The text that a run was trained on."""
FIRST = "transformer.layers.0"
SIGNS = {
    f"{FIRST}.compress.conv.weight": "compressive",
    f"{FIRST}.self_attn.key_pos_embeddings": "transformer-xl",
    f"{FIRST}.attn.interpolation_weight.0.linear.weight": "fast-weights",
    "transformer.weights": "feedback",
}
"""Our architecture by a tensor that identifies it, the first that is there."""


def read(folder: Path) -> Checkpoint:
    """The checkpoint in a folder."""
    at = _latest(folder)
    path = at / "info.json"
    tensors = _tensors(path)
    options = _options(folder / "configs.yaml")
    architecture = next((SIGNS[sign] for sign in SIGNS if sign in tensors), None)
    if architecture is None:
        raise MemspanError(
            f"{path} is not of labml_nn's Transformer-XL, Compressive, Feedback or Fast Weights: "
            f"it has none of {', '.join(SIGNS)}"
        )
    # A norm that their Fast Weights layers have and never use.
    if architecture == "fast-weights":
        tensors = {n: t for n, t in tensors.items() if ".norm_self_attn." not in n}
    n_tokens, _ = shape_of(tensors, "src_embed.weight", 2, path)
    tokenizer, about = _vocabulary(folder, n_tokens)
    config = RunConfig(
        model=_model(architecture, options, tensors, path),
        architecture=architecture,
        data=DataConfig(corpus="tiny-shakespeare", tokenizer=tokenizer.kind),
        embedding=EmbeddingConfig(tie=False, scale=False),
    )
    segment_length = max(options.integer("seq_len", 64), 1)
    config = replace(config, train=replace(config.train, segment_length=segment_length))
    own = partial(names, p=max(_rows(tensors, ".key_pos_embeddings") // 2, 1))
    return Checkpoint(config, tokenizer, tensors, own, path, tuple(about))


def _latest(folder: Path) -> Path:
    """The last checkpoint in a run's folder."""
    steps = [p.parent for p in folder.glob("checkpoints/*/info.json") if p.parent.name.isdecimal()]
    if not steps:
        raise MemspanError(
            f"{folder} has no checkpoint: put checkpoints/STEP with its info.json there"
        )
    return max(steps, key=lambda step: int(step.name))


def _tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of ``model`` in a checkpoint, whose ``info.json`` is at ``path``."""
    files = read_json(path).get("model")
    if isinstance(files, str):
        return load_tensors(path.parent / Path(files).name)
    if not isinstance(files, dict) or not files:
        raise MemspanError(f"{path} does not name a model and its files: get it again")
    # Nothing outside of the folder is read.
    return {name: _array(path.parent / Path(str(file)).name) for name, file in files.items()}


def _array(path: Path) -> Tensor:
    """A tensor that numpy saved, as a view of the file. Nothing is unpickled."""
    try:
        open_regular(path).close()
        return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
    except OSError as error:
        raise MemspanError(f"cannot read {path} ({error.strerror}): check the file") from None
    except Exception as error:
        # Numpy parses the header as Python source, which can fail in many ways.
        raise MemspanError(
            f"{path} is damaged or not an array ({str(error)[:100]}): get it again"
        ) from None


def _options(path: Path) -> Options:
    """The options that are numbers, of a YAML file in the shape that labml writes.

    An option is a line ``name:``, and its value an indented one, ``computed: 128``.
    """
    try:
        text = read_limited(path, LIMIT).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise MemspanError(f"cannot read {path} ({error}): check the file") from None
    found: dict[str, Any] = {}
    option = None
    for line in text.splitlines():
        if top := re.fullmatch(r"([\w.]+):\s*", line):
            option = top[1]
        elif option and (
            value := re.fullmatch(r"\s+computed: (-?\d{1,18}(\.\d{1,18})?(e-?\d\d?)?)\s*", line)
        ):
            found[option] = float(value[1]) if value[2] or value[3] else int(value[1])
    return Options(found, str(path))


def _model(
    architecture: str, options: Options, tensors: dict[str, Tensor], path: Path
) -> BackboneConfig:
    """The model's options; its sizes follow from the tensors."""
    layers = {name.split(".")[2] for name in tensors if name.startswith("transformer.layers.")}
    dropout, table = options.number("dropout", 0.0), _rows(tensors, ".key_pos_embeddings")
    common: dict[str, Any] = {
        "n_layers": len(layers),
        "d_model": shape_of(tensors, "src_embed.weight", 2, path)[1],
        "n_heads": _rows(tensors, ".query_pos_bias") or _rows(tensors, "_weight.0.linear.weight"),
        "d_ff": shape_of(tensors, f"{FIRST}.feed_forward.layer1.weight", 2, path)[0],
        "dropout": dropout,
    }
    if architecture == "fast-weights":
        nu = options.integer("nu", 1)
        return FastWeightsConfig(**common, nu=nu, epsilon=1e-6, norm="feed-forward")
    common |= {"attention_dropout": dropout, "attention_bias": True}
    if architecture == "feedback":
        shared = "transformer.key.linear.weight" in tensors
        return FeedbackConfig(
            **common,
            # They see all that was read in a call, which in training was a segment.
            memory_length=min(options.integer("seq_len"), table),
            max_distance=table,
            projections="shared" if shared else "per-layer",
            memory_norm=False,
            # Where keys and values are shared, its values have no bias.
            value_bias=not shared,
        )
    common |= {
        "memory_length": options.integer("mem_len"),
        "positions": "learned",
        "max_distance": table // 2 + 1,
    }
    if architecture == "transformer-xl":
        return TransformerXLConfig(**common)
    return CompressiveConfig(
        **common,
        compressed_length=options.integer("c_mem_len"),
        compression_rate=shape_of(tensors, f"{FIRST}.compress.conv.weight", 3, path)[2],
    )


def _rows(tensors: dict[str, Tensor], ending: str) -> int:
    """The rows of the first tensor whose name ends so; 0 without one."""
    found = [tensor.shape for name, tensor in tensors.items() if name.endswith(ending)]
    return found[0][0] if found and found[0] else 0


def _vocabulary(folder: Path, n_tokens: int) -> tuple[Tokenizer, list[str]]:
    """The tokeniser, and lines for the user about it."""
    path = folder / TEXT
    if not path.exists():
        return numbers(
            n_tokens,
            f"{folder} has no {TEXT}: put the text that the run was trained on there, which "
            "says what its tokens are",
        )
    try:
        # As Python reads text: every line ending becomes the same character.
        with open(path, encoding="utf-8") as text:
            found: set[str] = set()
            for line in text:
                found.update(line)
    except (OSError, UnicodeDecodeError) as error:
        raise MemspanError(f"cannot read {path} ({error}): check the file") from None
    characters = "".join(sorted(found))
    if len(characters) != n_tokens:
        raise MemspanError(
            f"{path} has {len(characters):,} different characters, and the model {n_tokens:,} tokens: "
            "put the text that it was trained on there, all of it"
        )
    return CharacterTokenizer(characters, others=False), []


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
    CompressiveConfig: RELATIVE | {"compress.conv": "compression"},
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
            rows[f"{here}.self_attn.query_pos_bias"] = item(backbone.content_bias, n)
            rows[f"{here}.self_attn.key_pos_embeddings"] = distance_table(own.position_keys, p)
            rows[f"{here}.self_attn.key_pos_bias"] = distance_table(own.position_scores, p)
    if kind is FeedbackConfig:
        rows["transformer.weights"] = whole(backbone.layer_weights)
        shared = backbone.config.projections == "shared"
        for n, (key, value) in enumerate(zip(backbone.key, backbone.value, strict=True)):
            there = "transformer" if shared else f"transformer.layers.{n}.attn"
            rows |= module(f"{there}.key.linear", key) | module(f"{there}.value.linear", value)
    return rows
