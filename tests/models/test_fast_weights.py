"""Fast Weights' own: options, precision, feature maps of memories, misuse, training and its files."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from architectures import VOCABULARY, fast_weights
from command_line import refused
from golden import assert_same
from memspan import cli
from memspan.errors import MemspanError
from memspan.models import FastWeights, LanguageModel
from memspan.models.fast_weights.config import FastWeightsConfig
from memspan.models.fast_weights.reader import FastWeightsReader
from memspan.ops.fast_weights import compiled as delta_rule_loop
from readings import text

SMALL: dict[str, Any] = {"n_layers": 2, "d_model": 8, "n_heads": 2, "d_ff": 12}


# ----- Options


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"nu": 0}, "nu must lie in 1 .. 7"),
        ({"nu": 8}, "nu must lie in 1 .. 7"),
        ({"feature_map": "elu", "nu": 2}, "nu belongs to feature_map dpfp"),
        ({"favor_features": 4}, "belongs to feature_map favor"),
        ({"favor_redraw": True}, "belongs to feature_map favor"),
        ({"feature_map": "favor", "favor_features": 0}, "favor_features must be at least 1"),
        ({"feature_map": "identity"}, "may be zero or negative"),
        ({"feature_map": "identity", "normalisation": "attention"}, "may be zero or negative"),
        ({"rule": "outer-product"}, "no feature map and no normalisation"),
        ({"outer_activation": "identity"}, "belongs to rule outer-product"),
        ({"d_model": 9, "positions": "sinusoidal", "n_heads": 3}, "even d_model"),
        ({"d_model": 9}, "not divisible"),
        ({"epsilon": -1.0}, "epsilon must be at least 0"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
    ],
)
def test_meaningless_options_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(MemspanError, match=reason) as caught:
        FastWeightsConfig(**SMALL | options)
    assert "\n" not in str(caught.value)


def test_meaningless_options_of_the_outer_product_are_refused() -> None:
    outer = SMALL | {
        "rule": "outer-product",
        "feature_map": "identity",
        "normalisation": "none",
    }
    FastWeightsConfig(**outer)
    for options, reason in (({"d_head": 3}, "d_head"), ({"recompute": True}, "recompute")):
        with pytest.raises(MemspanError, match=reason):
            FastWeightsConfig(**outer | options)


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


def test_feature_widths() -> None:
    """As docs/annotated/fast_weights.md lists them; heads are 4 wide."""
    widths = {
        ("dpfp", 1): 8,
        ("dpfp", 3): 24,
        ("elu", 1): 4,
        ("softmax", 1): 4,
    }
    for (kind, nu), width in widths.items():
        config = FastWeightsConfig(**SMALL, feature_map=kind, nu=nu)
        assert config.feature_width == width
    assert FastWeightsConfig(**SMALL, feature_map="favor").feature_width == 8
    assert FastWeightsConfig(**SMALL, feature_map="favor", favor_features=5).feature_width == 10


def test_options_change_what_is_computed() -> None:
    logits = [
        fast_weights(**options).model()(text(2, 9)).logits
        for options in (
            {},
            {"rule": "sum"},
            {"normalisation": "none"},
            {"normalisation": "attention"},
            {"positions": "sinusoidal"},
            {"final_norm": False},
            {"activation": "gelu"},
            {"epsilon": 0.1},
            {"norm": "post"},
            {"norm": "feed-forward"},
        )
    ]
    for i, a in enumerate(logits):
        assert not any(torch.allclose(a, b) for b in logits[:i])


@pytest.mark.parametrize("option", [{"recompute": True}, {"chunk_size": 3}, {"chunk_size": 64}])
def test_options_that_change_the_work_only(option: dict[str, Any]) -> None:
    results = []
    for options in ({}, option):
        model = fast_weights(**options).model().train()
        out = model(text(2, 50), targets=text(2, 50, 1))
        out.losses.sum().backward()
        results.append([out.losses, out.memory.weights, *(p.grad for p in model.parameters())])
    for ours, expected in zip(*results, strict=True):
        assert_same(ours, expected, 1e-9, str(option))


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


def test_attention_reads_the_normalised_input() -> None:
    """The norm before the attention is used: its gain matters, the scale of the input does not."""
    layer = next(fast_weights().model().backbone.stack())
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    seen = [layer(scale * x)[1].weights for scale in (1.0, 100.0)]
    assert_same(seen[0], seen[1], 1e-4, "fast weights")
    with torch.no_grad():
        layer.attention_norm.weight.mul_(2)
    assert not torch.allclose(layer(x)[1].weights, seen[0])


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "pytorch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rule": "sum", "activation": "gelu", "nu": 3, "n_layers": 3},
        {"normalisation": "none", "final_norm": False, "d_head": 9, "n_heads": 3},
        {"positions": "sinusoidal", "d_model": 40, "n_heads": 1, "d_ff": 23},
        {"norm": "feed-forward"},
    ],
    ids=["delta", "sum", "wide-heads", "positions", "norm"],
)
def test_a_reader_reads_single_tokens_as_the_model_does(
    options: dict[str, Any], dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between segments, after a memory, for several rows; the memory it was given stays."""
    if not compiled:
        monkeypatch.setattr(FastWeightsReader, "_step", None)
    elif not delta_rule_loop.available(torch.zeros(())):
        pytest.skip("no C compiler")
    model = FastWeights(FastWeightsConfig(**SMALL | options)).to(dtype).eval()
    with torch.no_grad():
        # Without normalisation the rule diverges where keys are long.
        alpha = 0.1 if model.config.normalisation == "none" else 0.3
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=alpha if p.dim() > 1 else 0.1)
        x = torch.randn(5, 40, model.config.d_model, dtype=dtype)
        memory = model(x[:, :9]).memory
        before = memory.weights.clone()
        expected = model(x[:, 9:], memory)
        reader = model.reader(memory, 5)
        assert (reader._step is not None) == compiled
        parts = [reader.read(part) for part in x[:, 9:].split([1, 1, 7, 1, 1, 18, 2], 1)]
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    assert_same(torch.cat(parts, 1), expected.hidden, tolerance, "hidden")
    assert_same(reader.memory.weights, expected.memory.weights, tolerance, "weights")
    assert torch.equal(memory.weights, before)


def test_a_reader_refuses_other_rows() -> None:
    reader = fast_weights().model().reader(batch_size=2)
    with pytest.raises(MemspanError, match="has 2 rows, and the tokens have 3"):
        reader.read(text(3, 1))


def test_dropout_is_for_training_only() -> None:
    model = fast_weights(dropout=0.3).model()
    assert torch.equal(model(text(2, 5)).logits, model(text(2, 5)).logits)
    model.train()
    assert not torch.allclose(model(text(2, 5)).logits, model(text(2, 5)).logits)


# ----- Implementations


@pytest.mark.parametrize(
    "options",
    [
        {"nu": 2},
        {"feature_map": "elu", "normalisation": "attention"},
        {"rule": "sum", "normalisation": "attention"},
        {"rule": "outer-product", "feature_map": "identity", "normalisation": "none"},
    ],
    ids=["delta", "delta-attention", "sum-attention", "outer-product"],
)
def test_the_reference_does_what_plain_autograd_does(options: dict[str, Any]) -> None:
    """The same numbers; gradients of gradients, and gradients per sample by torch.func."""
    model = fast_weights(**options).model()
    tokens, targets = text(3, 5), text(3, 5, 1)
    memory = model(text(1, 4, 2)).memory.detach()
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
        given = {"targets": targets[None], "implementation": "reference"}
        out = torch.func.functional_call(model, parameters, (tokens[None],), given)
        return out.losses.sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, tokens, targets)
    for row in range(3):
        losses = model(tokens[[row]], targets=targets[[row]]).losses
        gradients = torch.autograd.grad(losses.sum(), list(parameters.values()))
        for name, gradient in zip(parameters, gradients, strict=True):
            assert_same(per_sample[name][row], gradient, 1e-9, name)

    x = torch.randn(1, 3, 8, dtype=torch.float64, requires_grad=True)

    def hidden(x: Tensor) -> Tensor:
        return model.backbone(x, memory, implementation="reference").hidden

    assert_same(hidden(x), model.backbone(x, memory).hidden, 1e-9, "hidden")
    assert torch.autograd.gradgradcheck(hidden, x, fast_mode=True)


def test_unknown_and_missing_implementations_are_refused() -> None:
    with pytest.raises(MemspanError, match="no implementation 'quick': use compiled, chunked"):
        fast_weights().model()(text(1, 2), implementation="quick")
    outer = {"rule": "outer-product", "feature_map": "identity", "normalisation": "none"}
    with pytest.raises(MemspanError, match="no chunked implementation: use the reference"):
        fast_weights(**outer).model()(text(1, 2), implementation="chunked")


# ----- Precision


def test_memory_is_float32_whatever_the_rest() -> None:
    model = fast_weights().model(torch.float32).bfloat16()
    out = model(text(2, 5))
    assert out.logits.dtype == torch.bfloat16
    assert out.memory.weights.dtype == torch.float32
    reader = model.reader()
    reader.read(text(1, 1))
    assert reader.memory.weights.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        out = fast_weights().model(torch.float32)(text(2, 5))
    assert out.memory.weights.dtype == torch.float32


# ----- Favor's random features


def test_fixed_features_are_part_of_the_model() -> None:
    torch.manual_seed(0)
    options = SMALL | {"feature_map": "favor"}
    one, two = (LanguageModel(VOCABULARY, FastWeightsConfig(**options)).eval() for _ in range(2))
    assert not torch.equal(one(text(1, 5)).logits, two(text(1, 5)).logits)
    memory = one(text(1, 5)).memory
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(text(1, 5), memory).logits, two(text(1, 5), memory).logits)
    first = one.state_dict()["backbone.layers.0.attention.projection"].clone()
    one.train()(text(1, 5))
    assert torch.equal(one.state_dict()["backbone.layers.0.attention.projection"], first)


def test_redrawn_features() -> None:
    """New ones for every segment of training, which then starts empty; the last ones stay."""
    model = fast_weights(feature_map="favor", favor_redraw=True).model()
    memory = model(text(2, 5)).memory
    before = model.state_dict()
    model.train()
    torch.manual_seed(1)
    with_memory = model(text(2, 5), memory)
    torch.manual_seed(1)
    without = model(text(2, 5))
    assert torch.equal(with_memory.logits, without.logits)
    assert with_memory.memory.tokens_seen.tolist() == [5, 5]
    after = model.state_dict()
    drawn = [name for name in before if not torch.equal(before[name], after[name])]
    assert drawn == [
        "backbone.feature_id",
        *(f"backbone.layers.{n}.attention.projection" for n in range(2)),
    ]
    model.eval()
    assert_same(model(text(2, 5)).logits, without.logits, 1e-12, "with the last draw")
    with pytest.raises(MemspanError, match="another feature map"):
        model(text(2, 5), memory)


# ----- What does not fit


def test_a_memory_of_another_feature_map_is_refused() -> None:
    dpfp, favor = fast_weights().model(), fast_weights(feature_map="favor").model()
    memory = dpfp(text(2, 5)).memory
    assert memory.weights.shape == favor.initial_memory(2).weights.shape
    for attempt in (lambda: favor(text(2, 1), memory), lambda: favor.reader(memory)):
        with pytest.raises(MemspanError, match=r"rows 0, 1 .* another feature map"):
            attempt()
    # Empty rows may be read on from with any.
    favor(text(2, 1), memory.reset([True, True]))
    with pytest.raises(MemspanError, match="rows 1 of the memory"):
        favor(text(2, 1), memory.reset([True, False]))
    for options in ({"nu": 2}, {"d_head": 3}, {"normalisation": "attention"}):
        with pytest.raises(MemspanError, match=r"the memory's (weights|key_sum) is"):
            fast_weights(**options).model()(text(2, 1), memory)


def test_where_looking_would_wait_a_foreign_row_comes_out_as_nan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On other devices and in compiled graphs: no wait in a forward pass, and nothing silent."""
    dpfp, favor = fast_weights().model(), fast_weights(feature_map="favor").model()
    memory = dpfp(text(2, 5)).memory.reset([True, False])
    reader = favor.reader(batch_size=2)
    for module in ("fast_weights.model", "fast_weights.reader", "inputs"):
        name = f"memspan.models.{module}.can_look"
        monkeypatch.setattr(name, lambda x: False)
    monkeypatch.setattr(Tensor, "__bool__", lambda x: pytest.fail("a value was looked at"))
    monkeypatch.setattr(Tensor, "item", lambda x: pytest.fail("a value was looked at"))
    losses = favor(text(2, 3), memory, targets=text(2, 3)).losses
    reader.read(text(2, 1))
    reader.read(text(2, 3))
    monkeypatch.undo()
    assert losses.isnan().all(1).tolist() == [False, True]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("tokens", [slice(0, 6), slice(2, 3)])
def test_readers_refuse_keys_that_are_not_finite(value: float, tokens: slice) -> None:
    backbone = fast_weights().model().backbone
    x = torch.randn(3, 6, 8, dtype=torch.float64)
    x[1, 2, 0] = value
    with torch.no_grad(), pytest.raises(MemspanError, match="rows 1 are not finite"):
        backbone.reader(None, 3).read(x[:, tokens])


@pytest.mark.parametrize("training", [True, False])
def test_what_overflows_within_a_pass_comes_out_as_nan(training: bool) -> None:
    """In its row alone, and to the end: other processes may wait for this pass."""
    model = fast_weights().model().train(training)
    memory = model.initial_memory(3)
    memory.weights[1, 0, 0, 0] = float("inf")
    tokens = text(3, 6)
    losses = model(tokens, memory, targets=tokens).losses
    assert losses.isnan().any(1).tolist() == [False, True, False]


def test_memory_length_is_refused() -> None:
    with pytest.raises(MemspanError, match="memory_length is not an option"):
        fast_weights().model().initial_memory(1, memory_length=5)


# ----- Training, and the files it writes


def test_the_command_line(own_folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Says that nothing grows, and has no length to choose."""
    Path("text.txt").write_text("the memory of a segment " * 90)
    small = ["--model.n-layers", "1", "--model.d-model", "16", "--model.d-ff", "16"]
    loop = ["--train.steps", "2", "--train.batch-size", "2", "--train.segment-length", "8"]
    start = ["train", "--model", "fast-weights", "--data.corpus", "text.txt", "--out", "run"]
    cli.main([*start, *small, *loop, "--train.sample-tokens", "0", "--train.device", "cpu"])
    capsys.readouterr()
    cli.main(["evaluate", "run"])
    assert "memory of constant size" in capsys.readouterr().out
    assert "no option --memory-length" in refused(capsys, "evaluate", "run", "--memory-length", "5")
