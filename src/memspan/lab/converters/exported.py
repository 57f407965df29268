"""Folders that ``memspan export --to transformers`` wrote, or transformers after training on from one.

``config.json`` has a run's options by their own names, the weights are a run's behind ``model.``, and
``tokenizer.json`` is one of :mod:`memspan.lab.integrations.transformers.tokenizer`, with a padding
token.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from memspan.errors import MemspanError
from memspan.lab.converters.convert import Checkpoint
from memspan.lab.converters.names import Names, scalar, whole
from memspan.lab.converters.tensors import load_weights, read_json
from memspan.lab.data.tokenizers.base import Tokenizer
from memspan.lab.data.tokenizers.library import byte_level_bytes, read_library_tokenizer
from memspan.lab.data.tokenizers.plain import (
    UNKNOWN,
    ByteTokenizer,
    CharacterTokenizer,
    WordTokenizer,
)
from memspan.lab.runs.options import RunConfig, section
from memspan.models import LanguageModel
from memspan.models.options import EmbeddingConfig
from memspan.models.registry import MODELS

MODEL_TYPE = "memspan"
"""``model_type`` in their ``config.json``."""
PREFIX = "model."
UNTIED: dict[str, Any] = {"tie": False, "tie_projections": "none"}
"""Options of embedding and head under ``tie_word_embeddings=False``, whatever else they are."""


def read(folder: Path) -> Checkpoint:
    """The checkpoint in a folder."""
    path = folder / "config.json"
    values = read_json(path)
    architecture = values.get("architecture")
    length = values.get("segment_length")
    if not isinstance(architecture, str) or architecture not in MODELS:
        raise MemspanError(
            f"{path} is of an architecture {str(architecture)[:40]!r}: use one of {', '.join(MODELS)}, "
            "or import the module that registers it first"
        )
    if type(length) is not int:
        raise MemspanError(f"{path} has no segment_length: get it again")
    embedding = section(EmbeddingConfig, "embedding", values.get("embedding"))
    if values.get("tie_word_embeddings") is False:
        embedding = replace(embedding, **UNTIED)
    config: RunConfig[Any] = RunConfig(
        section(MODELS[architecture], "model", values.get("model")),
        architecture,
        embedding=embedding,
    )
    tokenizer = read_tokenizer(folder / "tokenizer.json")
    if values.get("vocab_size") != tokenizer.vocab_size:
        raise MemspanError(
            f"{path} has a vocab_size of {str(values.get('vocab_size'))[:40]}, and the tokenizer has "
            f"{tokenizer.vocab_size:,} tokens besides padding: if the model was resized, call its "
            f"resize_token_embeddings({tokenizer.vocab_size}) and save it again"
        )
    config = replace(
        config,
        data=replace(config.data, tokenizer=tokenizer.kind),
        train=replace(config.train, segment_length=length),
    )
    tensors, where = load_weights(folder)
    tensors = {name: tensor.reshape(tensor.shape or (1,)) for name, tensor in tensors.items()}
    return Checkpoint(config, tokenizer, tensors, _names, where)


def _names(model: LanguageModel) -> Names:
    own = model.state_dict(keep_vars=True)
    return {
        f"{PREFIX}{name}": whole(tensor) if tensor.dim() else scalar(tensor)
        for name, tensor in own.items()
    }


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokeniser that was exported as this ``tokenizer.json``."""
    value = read_json(path)
    try:
        model = value["model"]
        split = value["pre_tokenizer"] or {}
        vocabulary = {str(token): int(n) for token, n in model["vocab"].items()}
        ranked = sorted(vocabulary, key=vocabulary.__getitem__)
        if (model["type"], split.get("type")) == ("BPE", "ByteLevel") and not model["merges"]:
            bytes_of = byte_level_bytes()
            found = [bytes_of[letter] for letter in ranked]
            return ByteTokenizer(None if found == list(range(256)) else found)
        if (model["type"], split.get("type")) == ("WordLevel", "Split"):
            if split["behavior"] == "Isolated":
                others = ranked[:1] == [UNKNOWN]
                return CharacterTokenizer("".join(ranked[others:]), others)
            steps = (value["normalizer"] or {}).get("normalizers", [])
            return WordTokenizer(ranked, any(step["type"] == "Lowercase" for step in steps))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise MemspanError(
            f"{path} is not a tokenizer.json that memspan exported ({type(error).__name__} {error}): "
            "save the tokenizer next to the model"
        ) from None
    return read_library_tokenizer(path)
