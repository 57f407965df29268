"""A model's fingerprint changes with everything that changes its function, and with nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from architectures import CASES, ONE_OF_EACH, VOCABULARY, randomise
from memspan.errors import MemspanError
from memspan.memory import Memory
from memspan.models import BackboneConfig, EmbeddingConfig, LanguageModel
from memspan.models.fingerprints import fingerprint
from readings import some_memory, text

pytestmark = pytest.mark.gradients(recorded=False)

Options = dict[str, Any]

CONFIGS = {type(CASES[case].backbone): CASES[case].backbone for case in ONE_OF_EACH.values()}
VALUES: dict[Any, Sequence[object]] = {
    bool: (False, True),
    bool | None: (False, True),
    int: (4,),
    int | None: (2, 4, 5, 8),
    float: (0.5,),
    float | None: (0.5,),
    str: ("lstm",),
    tuple[int, ...]: ((3, 6),),
}
"""Values to set options of these types to; integers also to one more than they are."""

POST = {"normalisation": "post"}
NO_NORM = {"final_norm": False}
ONE_LAYER = {"n_layers": 1}
LEARNED = {"positions": "learned", "max_distance": 40}
SPANS = {"adaptive_span": 1e-3, "max_distance": 9, "span_ramp": 2}
FAVOR = {"feature_map": "favor"}
OUTER = {"rule": "outer-product", "feature_map": "identity", "normalisation": "none"}
CLUSTERS = {"cutoffs": (3,), "div_val": 2, "tie_projections": "all"}
PAIRS: list[tuple[Options, Options]] = [
    (NO_NORM, POST),
    (POST, NO_NORM),
    (NO_NORM, {"norm": "post"}),
    ({"norm": "post"}, NO_NORM),
    ({}, LEARNED),
    (LEARNED, {"max_distance": 41}),
    ({"attention_span": "fixed"}, {"memory_length": 4}),
    (ONE_LAYER, {"tie_position_biases": True}),
    (ONE_LAYER, {"projections": "per-layer"}),
    ({}, {"auxiliary_loss": "none", "task_gradient": True}),
    ({"compression": "mean"}, {"compressed_length": 0}),
    ({"compression": "mean"}, {"compression_rate": 3}),
    ({"compression": "mean"}, {"compression": "max"}),
    (NO_NORM | {"memory_norm": False}, POST),
    (POST, {"memory_norm": False}),
    ({"memory_vector": "mean"}, {"memory_vector": "last"}),
    ({"attention_bias": True}, {"value_bias": True}),
    (SPANS, {"adaptive_span": 1e-2}),
    (SPANS, {"span_ramp": 3}),
    (SPANS, {"memory_length": 4}),
    (OUTER, {"outer_activation": "identity"}),
    (FAVOR, {"favor_features": 4}),
    (FAVOR, {"favor_features": 5}),
    ({"cutoffs": (3, 6)}, {"cutoffs": (4, 6)}),
    ({"cutoffs": (3,), "div_val": 5}, {"div_val": 6}),
    (CLUSTERS, {"tie_projections": "none"}),
]
"""Changes of options beside others, for all that have them."""


def changes(config: Any) -> Iterator[tuple[Options, Options]]:
    """Options to set first and to change then: each by itself, and in pairs."""
    kinds = get_type_hints(type(config))
    for name, now in vars(config).items():
        values = {*VALUES.get(kinds[name], get_args(kinds[name]))}
        for value in (values | ({now + 1} if type(now) is int else set())) - {now}:
            yield {}, {name: value}
    yield from (pair for pair in PAIRS if {*pair[0], *pair[1]} <= vars(config).keys())


def model_of(config: Any) -> LanguageModel:
    of = (CASES["xl-segment"].backbone, config) if type(config) is EmbeddingConfig else (config,)
    return randomise(LanguageModel(VOCABULARY, *of)).double().eval()


def compute_the_same(one: LanguageModel, other: LanguageModel) -> bool:
    """True if ``other`` takes the weights of ``one``, exchanges memories and computes the same."""
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
    "config", [*CONFIGS.values(), EmbeddingConfig()], ids=lambda config: type(config).__name__
)
def test_an_option_counts_if_it_changes_the_function(config: Any) -> None:
    tried = set()
    wrong = []
    for base, change in changes(config):
        try:
            before = dataclasses.replace(config, **base)
            one = model_of(before)
            other = model_of(dataclasses.replace(before, **change))
        except MemspanError:
            continue
        tried |= change.keys()
        same = compute_the_same(one, other)
        if (one.fingerprint() == other.fingerprint()) != same:
            wrong.append((base, change, same))
    assert not wrong
    assert tried == vars(config).keys()
    assert config.same_function - BackboneConfig.same_function <= tried


def test_new_option_leaves_fingerprints_as_they_are() -> None:
    """Unless it is set."""
    for known, config in CONFIGS.items():
        later = dataclasses.make_dataclass(
            known.__name__, [("later", int, 3)], bases=(known,), frozen=True
        )
        before, after, changed = (
            fingerprint(options, EmbeddingConfig(), "digest")
            for options in (config, later(**vars(config)), later(**vars(config), later=4))
        )
        assert before == after != changed
