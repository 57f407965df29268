"""A model's fingerprint, which its memories carry: a hash of all that its function depends on."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Set
from typing import Any

from memspan.memory import Fingerprint
from memspan.models.compressive.config import CompressiveConfig
from memspan.models.fast_weights.config import FastWeightsConfig
from memspan.models.feedback.config import FeedbackConfig
from memspan.models.lstm.config import LSTMConfig
from memspan.models.options import BackboneConfig, EmbeddingConfig
from memspan.models.transformer.config import TransformerConfig
from memspan.models.transformer_xl.config import TransformerXLConfig

_RELATIVE = """attention_span positions max_distance clamp_length tie_position_biases normalisation
    final_norm attention_bias initialisation dropout attention_dropout"""
OPTIONS_OF_0_1_0: dict[type, str] = {
    TransformerXLConfig: f"n_layers d_model n_heads d_head d_ff activation memory_length {_RELATIVE}",
    CompressiveConfig: f"""n_layers d_model n_heads d_head d_ff activation memory_length
        compressed_length compression_rate compression auxiliary_loss task_gradient {_RELATIVE}""",
    FeedbackConfig: """n_layers d_model n_heads d_head d_ff activation memory_length max_distance
        projections memory_vector normalisation final_norm memory_norm attention_bias value_bias
        adaptive_span span_ramp initialisation dropout attention_dropout""",
    FastWeightsConfig: """n_layers d_model n_heads d_head d_ff activation rule outer_activation
        feature_map nu favor_features favor_redraw normalisation epsilon norm positions chunk_size
        recompute final_norm initialisation dropout""",
    LSTMConfig: "n_layers d_model initialisation dropout",
    TransformerConfig: "n_layers d_model n_heads d_ff activation initialisation dropout",
}
"""The options that 0.1.0 hashed, in its order. Newer ones are not added."""
EMBEDDING_OF_0_1_0 = {"embedding.scale", "embedding.cutoffs"}
"""The options that count now and that 0.1.0 had, but did not hash."""


def fingerprint(backbone: BackboneConfig, embedding: EmbeddingConfig, weights: str) -> Fingerprint:
    """The fingerprint of a model with these options.

    An option counts by name, and only where it differs from its default, so that one more leaves all
    fingerprints as they are; a default must never change. Options in ``same_function`` do not count.
    ``weights``: their digest.
    """
    options = _counted("model", backbone) | _counted("embedding", embedding)
    named = [f"{name}={value!r}" for name, value in sorted(options.items())]
    now = _hash("\n".join([type(backbone).__name__, *named, weights]))
    return Fingerprint(now, _of_0_1_0(backbone, options.keys(), weights))


def _counted(section: str, config: Any) -> dict[str, object]:
    """The options that change the function and are not at their defaults."""
    return {
        f"{section}.{field.name}": value
        for field in dataclasses.fields(config)
        if field.name not in config.same_function
        and (value := getattr(config, field.name)) != field.default
    }


def _of_0_1_0(config: BackboneConfig, counted: Set[str], weights: str) -> str | None:
    """The fingerprint that 0.1.0 gave such a model; None if it did not have the options that count."""
    shown = repr(config)
    if names := OPTIONS_OF_0_1_0.get(type(config), "").split():
        if not counted <= EMBEDDING_OF_0_1_0 | {f"model.{name}" for name in names}:
            return None
        values = (f"{name}={getattr(config, name)!r}" for name in names)
        shown = f"{type(config).__name__}({', '.join(values)})"
    return _hash(f"{shown} {weights}")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
