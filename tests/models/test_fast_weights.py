"""Fast Weights' own: options, where norms stand, feature maps of memories."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from architectures import SMALL, VOCABULARY, fast_weights
from golden import assert_same
from memspan.errors import MemspanError
from memspan.models import LanguageModel
from memspan.models.fast_weights.config import FastWeightsConfig
from readings import text

OUTER = {"rule": "outer-product", "feature_map": "identity", "normalisation": "none"}


# ----- Options


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"nu": 0}, "nu must lie in 1 .. 7"),
        ({"nu": 8}, "nu must lie in 1 .. 7"),
        ({"feature_map": "elu", "nu": 2}, "nu belongs to feature_map dpfp"),
        ({"favor_features": 4}, "belongs to feature_map favor"),
        ({"feature_map": "favor", "favor_features": 0}, "favor_features must be at least 1"),
        ({"feature_map": "identity"}, "may be zero or negative"),
        ({"feature_map": "identity", "normalisation": "attention"}, "may be zero or negative"),
        ({"rule": "outer-product"}, "no feature map and no normalisation"),
        ({"outer_activation": "identity"}, "belongs to rule outer-product"),
        ({"d_model": 9, "positions": "sinusoidal", "n_heads": 3}, "even d_model"),
        ({"d_model": 9}, "not divisible"),
        (OUTER | {"d_head": 3}, "d_head"),
        (OUTER | {"recompute": True}, "recompute"),
        ({"epsilon": -1.0}, "epsilon must be at least 0"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
    ],
)
def test_meaningless_options_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(MemspanError, match=reason) as caught:
        FastWeightsConfig(**SMALL | options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("feature_map", "normalisation"),
    [
        *itertools.product(("dpfp", "elu", "favor", "softmax"), ("sum", "attention", "none")),
        ("identity", "none"),
    ],
)
@pytest.mark.parametrize("rule", ["delta", "sum"])
def test_every_other_combination_works(rule: str, feature_map: str, normalisation: str) -> None:
    options = {"rule": rule, "feature_map": feature_map, "normalisation": normalisation}
    model = LanguageModel(VOCABULARY, FastWeightsConfig(**SMALL | options)).double()
    out = model(text(2, 40), targets=text(2, 40, 1))
    out.losses.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    reader = model.eval().reader(batch_size=2)
    for token in text(2, 40).split(1, 1):
        reader.read(token)
    assert_same(reader.memory.weights, out.memory.weights, 1e-9, "weights")
    width = model.backbone.config.feature_width
    assert out.memory.weights.shape == (2, 2, 2, width, 4)


@pytest.mark.parametrize("implementation", ["reference", "chunked", None])
def test_attention_normalisation_sums_earlier_keys_exactly(
    implementation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """z(t-1) . k(t) in float32: 0 for the first token, a sum over earlier keys for the others."""
    model = fast_weights(feature_map="elu", normalisation="attention").model(torch.float32)
    attention = next(model.backbone.stack()).attention
    seen: list[Tensor] = []
    original = attention.overlap
    monkeypatch.setattr(attention, "overlap", lambda z_k: seen.append(z_k) or original(z_k))
    x = torch.randn(2, 40, 8)
    with torch.no_grad():
        _, k, _, _ = attention.project(x)
        attention(x, None, implementation)
    k = attention.features(k).double()
    earlier = k.cumsum(2) - k
    assert not seen[0][:, :, 0].any()
    assert_same(seen[0][..., 0], (earlier * k).sum(-1), 1e-6, "z . k")


@pytest.mark.parametrize("norm", ["pre", "post", "feed-forward"])
def test_norms_stand_where_the_option_says(norm: str) -> None:
    model = fast_weights(norm=norm, n_layers=1).model()
    layer = next(model.backbone.stack())
    names = [n for n, _ in layer.named_parameters() if "norm.weight" in n]
    assert ("attention_norm.weight" in names) == (norm != "feed-forward")
    x = torch.randn(2, 5, 8, dtype=torch.float64)

    def attention(x: Tensor) -> Tensor:
        return layer.attention(x)[0]

    if norm == "post":
        h = layer.attention_norm(x + attention(x))
        expected = layer.feed_forward_norm(h + layer.feed_forward(h))
    else:
        h = x + attention(x if norm == "feed-forward" else layer.attention_norm(x))
        h = h + layer.feed_forward(layer.feed_forward_norm(h))
        expected = model.backbone.final_norm(h)
    assert_same(model.backbone(x).hidden, expected, 1e-12, norm)


# ----- Favor's random features


def test_random_features_are_a_part_of_the_model() -> None:
    """Passes in training do not draw them anew, and they are loaded with the weights."""
    model, loaded = (fast_weights(feature_map="favor").model() for _ in range(2))
    for layer in loaded.backbone.stack():
        layer.attention.projection.copy_(layer.attention.draw_projection())
    before = copy.deepcopy(model.state_dict())
    memory = model.train()(text(2, 5)).memory
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    expected = model.eval()(text(2, 5), memory).logits
    assert not loaded(text(2, 5), memory).logits.equal(expected)
    loaded.load_state_dict(model.state_dict())
    assert loaded(text(2, 5), memory).logits.equal(expected)


@pytest.mark.parametrize("options", [{"nu": 2}, {"d_head": 3}, {"normalisation": "attention"}])
def test_a_memory_of_other_sizes_is_refused(options: dict[str, Any]) -> None:
    memory = fast_weights().model()(text(2, 5)).memory
    with pytest.raises(MemspanError, match=r"the memory's (weights|key_sum) is"):
        fast_weights(**options).model()(text(2, 1), memory)


def test_memory_length_is_refused() -> None:
    with pytest.raises(MemspanError, match="memory_length is not an option"):
        fast_weights().model().initial_memory(1, memory_length=5)
