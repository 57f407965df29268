"""A model's fingerprint changes with everything that changes its function, and with nothing else."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from architectures import (
    VOCABULARY,
    compressive,
    fast_weights,
    feedback,
    gated_delta_net,
    randomise,
    transformer_xl,
)
from memspan.errors import MemspanError
from memspan.memory import Memory
from memspan.models import (
    MODELS,
    BackboneConfig,
    EmbeddingConfig,
    LanguageModel,
    LSTMConfig,
    TransformerConfig,
    fingerprints,
)
from memspan.models.fingerprints import fingerprint
from readings import some_memory, text

pytestmark = pytest.mark.gradients(recorded=False)

Options = dict[str, Any]

XL, COMPRESSIVE, FEEDBACK, FAST, GATED = (
    make().backbone
    for make in (transformer_xl, compressive, feedback, fast_weights, gated_delta_net)
)
LSTM = LSTMConfig(n_layers=2, d_model=8)
TRANSFORMER = TransformerConfig(n_layers=2, d_model=8, n_heads=2, d_ff=12)

LEARNED = {"positions": "learned", "max_distance": 40}
POST = {"normalisation": "post"}
SPANS = {"adaptive_span": 1e-3, "max_distance": 9, "span_ramp": 2}
FAVOR = {"feature_map": "favor"}
PLAIN = {"feature_map": "identity", "normalisation": "none"}

COMMON: list[tuple[Options, Options]] = [
    ({}, {"n_layers": 3}),
    ({}, {"d_model": 4}),
    ({}, {"initialisation": "papers"}),
    ({}, {"dropout": 0.5}),
]
LAYERS = [*COMMON, ({}, {"n_heads": 4}), ({}, {"d_ff": 8}), ({}, {"activation": "gelu"})]
HEADS = [*LAYERS, ({}, {"d_head": 4}), ({}, {"d_head": 3}), ({}, {"final_norm": False})]
ATTENTION = [
    *HEADS,
    ({"final_norm": False}, POST),
    (POST, {"final_norm": False}),
    ({}, {"attention_bias": True}),
    ({}, {"attention_dropout": 0.5}),
    ({}, {"memory_length": 4}),
]
RELATIVE = [
    *ATTENTION,
    ({}, {"attention_span": "fixed"}),
    ({"attention_span": "fixed"}, {"memory_length": 4}),
    ({}, LEARNED),
    (LEARNED, {"max_distance": 41}),
    ({}, {"clamp_length": 2}),
    ({}, {"tie_position_biases": True}),
    ({"n_layers": 1}, {"tie_position_biases": True}),
    ({}, {"gating": "gru"}),
]
CHANGES: dict[Any, list[tuple[Options, Options]]] = {
    XL: [*RELATIVE, ({}, {"start": "zeros"}), ({}, {"norm_epsilon": 0.1})],
    COMPRESSIVE: [
        *RELATIVE,
        ({}, {"compressed_length": 2}),
        ({"compression": "mean"}, {"compressed_length": 0}),
        ({}, {"compression_rate": 3}),
        ({"compression": "mean"}, {"compression_rate": 3}),
        ({"compression": "mean"}, {"compression": "max"}),
        ({}, {"auxiliary_loss": "none", "task_gradient": True}),
        ({}, {"auxiliary_loss": "auto-encoding"}),
        ({}, {"task_gradient": True}),
    ],
    FEEDBACK: [
        *ATTENTION,
        ({"final_norm": False, "memory_norm": False}, POST),
        ({}, {"max_distance": 5}),
        ({}, {"max_distance": 6}),
        ({}, {"projections": "per-layer"}),
        ({"n_layers": 1}, {"projections": "per-layer"}),
        ({}, {"memory_vector": "last"}),
        ({"memory_vector": "mean"}, {"memory_vector": "last"}),
        ({}, {"memory_norm": False}),
        (POST, {"memory_norm": False}),
        ({}, {"value_bias": True}),
        ({"attention_bias": True}, {"value_bias": True}),
        ({}, {"adaptive_span": 1e-3}),
        (SPANS, {"adaptive_span": 1e-2}),
        (SPANS, {"span_ramp": 3}),
        (SPANS, {"memory_length": 4}),
    ],
    FAST: [
        *HEADS,
        ({"norm": "post"}, {"final_norm": False}),
        ({"final_norm": False}, {"norm": "post"}),
        ({}, {"norm": "feed-forward"}),
        ({}, {"rule": "sum"}),
        (PLAIN | {"rule": "outer-product"}, {"outer_activation": "identity"}),
        ({}, {"feature_map": "elu"}),
        ({}, {"nu": 2}),
        ({}, FAVOR),
        (FAVOR, {"favor_features": 4}),
        (FAVOR, {"favor_features": 5}),
        (FAVOR, {"favor_redraw": True}),
        ({}, {"normalisation": "attention"}),
        ({}, {"epsilon": 0.1}),
        ({}, {"positions": "sinusoidal"}),
        ({}, {"chunk_size": 2}),
        ({}, {"recompute": True}),
    ],
    GATED: [
        *LAYERS,
        ({}, {"d_head": 4}),
        ({}, {"d_head": 3}),
        ({}, {"n_value_heads": 2}),
        ({}, {"n_value_heads": 4}),
        ({}, {"d_value": 4}),
        ({}, {"d_value": 6}),
        ({}, {"convolution": 2}),
        ({}, {"negative_eigenvalues": True}),
        ({}, {"chunk_size": 2}),
        ({}, {"recompute": True}),
    ],
    LSTM: COMMON,
    TRANSFORMER: LAYERS,
}
ALL_TIED = {"tie_projections": "all"}
EMBEDDINGS: list[tuple[Options, Options]] = [
    ({}, {"tie": False}),
    ({}, {"scale": False}),
    ({}, {"d_embed": 8}),
    ({}, {"d_embed": 6}),
    ({}, {"cutoffs": (3, 6)}),
    ({"cutoffs": (3, 6)}, {"cutoffs": (4, 6)}),
    ({}, {"div_val": 2}),
    ({"cutoffs": (3,), "div_val": 5}, {"div_val": 6}),
    ({"cutoffs": (3,), "div_val": 2} | ALL_TIED, {"tie_projections": "none"}),
    ({}, {"output_dropout": 0.5}),
]


def model_of(backbone: Any, embedding: EmbeddingConfig | None = None) -> LanguageModel:
    return randomise(LanguageModel(VOCABULARY, backbone, embedding)).double().eval()


def compute_the_same(one: LanguageModel, other: LanguageModel) -> bool:
    """Whether ``other`` can have the weights of ``one``, which it gets, takes its memories or has such
    as ``one`` takes, and does the same with them."""
    try:
        other.load_state_dict(one.state_dict())
    except RuntimeError:
        return False
    found = []
    for memory in (some_memory(one, 3), some_memory(other, 3)):
        with contextlib.suppress(MemspanError):
            found.append(all(map(equal, *(outcomes(model, memory) for model in (one, other)))))
    return bool(found) and all(found)


def outcomes(model: LanguageModel, memory: Memory) -> list[Tensor]:
    """Logits and fields of memory, segment by segment."""
    tensors = []
    for n in range(3):
        out = model(text(3, 6, n), memory)
        memory = out.memory
        tensors += [out.logits, *memory.tensors().values()]
    return tensors


def equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, 1e-9, 1e-9)


@pytest.mark.parametrize(
    ("config", "base", "change"),
    [
        pytest.param(config, *pair, id=f"{type(config).__name__}-{pair[1]}")
        for config, pairs in CHANGES.items()
        for pair in pairs
    ],
)
def test_an_option_counts_if_it_changes_the_function(
    config: Any, base: Options, change: Options
) -> None:
    before = dataclasses.replace(config, **base)
    one, other = model_of(before), model_of(dataclasses.replace(before, **change))
    same = compute_the_same(one, other)
    assert (one.fingerprint() == other.fingerprint()) == same


@pytest.mark.parametrize(("base", "change"), EMBEDDINGS)
@pytest.mark.parametrize("config", [XL, LSTM])
def test_so_does_one_of_the_embedding(config: Any, base: Options, change: Options) -> None:
    before = EmbeddingConfig(**base)
    one, other = model_of(config, before), model_of(config, dataclasses.replace(before, **change))
    same = compute_the_same(one, other)
    assert (one.fingerprint() == other.fingerprint()) == same


def test_every_option_is_tried() -> None:
    tried = {type(config): pairs for config, pairs in CHANGES.items()}
    assert set(MODELS.values()) == set(tried)
    for config, pairs in {**tried, EmbeddingConfig: EMBEDDINGS}.items():
        names = {field.name for field in dataclasses.fields(config)}
        assert names == {name for _, change in pairs for name in change}
        assert config.same_function - BackboneConfig.same_function <= names


def test_a_later_option_leaves_fingerprints_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 0.1.0, too, unless it is set."""
    for config in CHANGES:
        known = type(config)
        later = dataclasses.make_dataclass(
            known.__name__, [("later", int, 3)], bases=(known,), frozen=True
        )
        was_there = known in fingerprints.OPTIONS_OF_0_1_0
        if was_there:
            monkeypatch.setitem(
                fingerprints.OPTIONS_OF_0_1_0, later, fingerprints.OPTIONS_OF_0_1_0[known]
            )
        before, after, changed = (
            fingerprint(options, EmbeddingConfig(), "digest")
            for options in (config, later(**vars(config)), later(**vars(config), later=4))
        )
        assert before == after != changed
        if was_there:
            assert before.of_0_1_0 == after.of_0_1_0 is not None
            assert changed.of_0_1_0 is None


def test_fingerprints_are_text() -> None:
    found = model_of(XL).fingerprint()
    for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert other == found
        assert vars(other) == vars(found)
