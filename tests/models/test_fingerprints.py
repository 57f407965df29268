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


def each(**changes: Any) -> list[tuple[Options, Options]]:
    """One option after the other, each changed by itself."""
    return [({}, {name: value}) for name, value in changes.items()]


LEARNED = {"positions": "learned", "max_distance": 40}
POST = {"normalisation": "post"}
SPANS = {"adaptive_span": 1e-3, "max_distance": 9, "span_ramp": 2}
FAVOR = {"feature_map": "favor"}
MEAN = {"compression": "mean"}
PLAIN = {"feature_map": "identity", "normalisation": "none"}

COMMON = each(n_layers=3, d_model=4, initialisation="papers", dropout=0.5)
LAYERS = [*COMMON, *each(n_heads=4, d_ff=8, activation="gelu")]
HEADS = [*LAYERS, *each(d_head=4, final_norm=False), ({}, {"d_head": 3})]
ATTENTION = [
    *HEADS,
    *each(attention_bias=True, attention_dropout=0.5, memory_length=4),
    ({"final_norm": False}, POST),
    (POST, {"final_norm": False}),
]
RELATIVE = [
    *ATTENTION,
    *each(attention_span="fixed", clamp_length=2, tie_position_biases=True, gating="gru"),
    ({"attention_span": "fixed"}, {"memory_length": 4}),
    ({}, LEARNED),
    (LEARNED, {"max_distance": 41}),
    ({"n_layers": 1}, {"tie_position_biases": True}),
]
CHANGES: dict[Any, list[tuple[Options, Options]]] = {
    XL: [*RELATIVE, *each(start="zeros", norm_epsilon=0.1)],
    COMPRESSIVE: [
        *RELATIVE,
        *each(compressed_length=2, compression_rate=3, task_gradient=True),
        *each(auxiliary_loss="auto-encoding"),
        ({}, {"auxiliary_loss": "none", "task_gradient": True}),
        (MEAN, {"compressed_length": 0}),
        (MEAN, {"compression_rate": 3}),
        (MEAN, {"compression": "max"}),
    ],
    FEEDBACK: [
        *ATTENTION,
        *each(max_distance=5, projections="per-layer", memory_vector="last", memory_norm=False),
        *each(value_bias=True, adaptive_span=1e-3),
        ({"final_norm": False, "memory_norm": False}, POST),
        ({}, {"max_distance": 6}),
        ({"n_layers": 1}, {"projections": "per-layer"}),
        ({"memory_vector": "mean"}, {"memory_vector": "last"}),
        (POST, {"memory_norm": False}),
        ({"attention_bias": True}, {"value_bias": True}),
        (SPANS, {"adaptive_span": 1e-2}),
        (SPANS, {"span_ramp": 3}),
        (SPANS, {"memory_length": 4}),
    ],
    FAST: [
        *HEADS,
        *each(norm="feed-forward", rule="sum", feature_map="elu", normalisation="attention"),
        *each(nu=2, epsilon=0.1, positions="sinusoidal", chunk_size=2, recompute=True),
        ({"norm": "post"}, {"final_norm": False}),
        ({"final_norm": False}, {"norm": "post"}),
        (PLAIN | {"rule": "outer-product"}, {"outer_activation": "identity"}),
        ({}, FAVOR),
        (FAVOR, {"favor_features": 4}),
        (FAVOR, {"favor_features": 5}),
        (FAVOR, {"favor_redraw": True}),
    ],
    GATED: [
        *LAYERS,
        *each(d_head=4, n_value_heads=2, d_value=4, convolution=2, negative_eigenvalues=True),
        *each(d_head=3, n_value_heads=4, d_value=6, chunk_size=2, recompute=True),
    ],
    LSTM: COMMON,
    TRANSFORMER: LAYERS,
}
CLUSTERS = {"cutoffs": (3,), "div_val": 2}
EMBEDDINGS = [
    *each(tie=False, scale=False, d_embed=8, cutoffs=(3, 6), div_val=2, output_dropout=0.5),
    ({}, {"d_embed": 6}),
    ({"cutoffs": (3, 6)}, {"cutoffs": (4, 6)}),
    ({"cutoffs": (3,), "div_val": 5}, {"div_val": 6}),
    (CLUSTERS | {"tie_projections": "all"}, {"tie_projections": "none"}),
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
