"""Starting from another run: what is taken means the same, and what does not fit is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import memspan
import tiny_runs
from architectures import randomise
from golden import assert_same
from memspan.data.options import DataConfig
from memspan.data.tokenizers.base import Tokenizer
from memspan.data.tokenizers.plain import ByteTokenizer, CharacterTokenizer
from memspan.errors import MemspanError
from memspan.models import LanguageModel
from memspan.models.compressive.config import CompressiveConfig
from memspan.models.feedback.config import FeedbackConfig
from memspan.models.transformer_xl.config import TransformerXLConfig as XL
from memspan.ops.feedback.attention import Distances, feedback_attention
from memspan.ops.relative import Positions, relative_attention
from memspan.runs.options import RunConfig
from memspan.runs.run import Run
from memspan.training.options import OptimConfig
from memspan.training.warm_start import initialise_from

SIZE: dict[str, Any] = {"n_layers": 2, "d_model": 8, "n_heads": 2, "d_ff": 12, "memory_length": 5}
BYTES = ByteTokenizer()


def run_of(model: Any, tokenizer: Tokenizer = BYTES, name: str = "transformer-xl") -> Run:
    made = randomise(LanguageModel(tokenizer.vocab_size, model), seed=3)
    config = RunConfig(model=model, architecture=name)  # type: ignore[arg-type]
    return Run(Path("source"), config, tokenizer, made, 0, {})


def feedback_of(**options: Any) -> LanguageModel:
    return randomise(LanguageModel(256, FeedbackConfig(**SIZE | options)))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_scores_of_a_transformer_xl_are_kept(positions: str, tied: bool) -> None:
    """Attention over the same keys, one token back and more: the same numbers."""
    table = {"max_distance": 12} if positions == "learned" else {}
    source = run_of(XL(**SIZE, positions=positions, tie_position_biases=tied, **table))
    model = feedback_of(max_distance=9)
    initialise_from(model, BYTES, source)
    q, k, v = (torch.randn(1, 2, n, 4) for n in (1, 6, 6))
    theirs = source.model.backbone
    codes = theirs.span().codes(theirs.config, 7, 5, theirs.content_bias)
    for n, (layer, taken) in enumerate(zip(model.backbone.layers, theirs.stack(), strict=True)):
        u, w = theirs.biases(n)
        keys, scores = taken.attention.distances(codes)
        # Ours does not see itself: the distance 0 is left out.
        expected = relative_attention(
            q, torch.cat([k, q], 2), torch.cat([v, q], 2),
            Positions(keys, scores, content_bias=u, position_bias=w),
            mask=(torch.arange(7) < 6)[None, None], implementation="reference",
        )  # fmt: skip
        ours = feedback_attention(
            q[:, :, 0], k, v, Distances(layer.position_keys, layer.position_scores),
            layer.content_bias, torch.ones(1, 6, dtype=torch.bool),
        )  # fmt: skip
        assert_same(ours, expected[:, :, 0], 1e-5, "attention")


def test_the_report_is_the_truth() -> None:
    """What is said to be mapped is the source's, what is said to be new is as it was."""
    source = run_of(XL(**SIZE, positions="learned", max_distance=4))
    model = feedback_of(projections="per-layer")
    before = {n: t.clone() for n, t in model.state_dict().items()}
    report = initialise_from(model, BYTES, source)
    theirs = {t.sum().item() for t in source.model.state_dict().values()}
    theirs |= {t.sum().item() for t in source.model.backbone.content_bias}
    after = model.state_dict()
    assert sorted([*report.mapped, *report.partly, *report.fresh]) == sorted(after)
    fresh = ["layer_weights", "memory_norm.weight", "memory_norm.bias"]
    assert report.fresh == [f"backbone.{name}" for name in fresh]
    for name in report.mapped:
        assert after[name].sum().item() in theirs, name
        assert not torch.equal(after[name], before[name]), name
    for n, layer in enumerate(model.backbone.layers):
        table = list(source.model.backbone.layers)[n].attention.position_keys
        name = f"backbone.layers.{n}.position_keys"
        assert name in report.partly
        assert torch.equal(layer.position_keys[:3], table[1:])
        assert torch.equal(layer.position_keys[3:], before[name][3:])
    for name in report.fresh:
        assert torch.equal(after[name], before[name])
    summary = report.summary()
    assert f"{len(report.mapped)} tensors mapped" in summary
    assert "in part: backbone.layers.*.position_keys" in summary
    assert "new: backbone.layer_weights" in summary


def test_the_same_architecture_is_taken_whole() -> None:
    source, model = run_of(FeedbackConfig(**SIZE), name="feedback"), feedback_of()
    report = initialise_from(model, BYTES, source)
    assert report.fresh == report.partly == []
    assert model.fingerprint() == source.model.fingerprint()


@pytest.mark.parametrize(
    ("source", "characters", "message"),
    [
        (XL(**SIZE | {"d_model": 12}), "abc", "same width, set --model.d-model 12"),
        (XL(**SIZE | {"n_heads": 4}, d_head=4), "abc", "--model.n-heads"),
        (XL(**SIZE, d_head=3), "abc", "--model.d-head"),
        (CompressiveConfig(**SIZE), "abc", "transformer-xl"),
        # Another size, and the same size with other words.
        (XL(**SIZE), "abcd", "another vocabulary .* set --data.tokenizer source.tokenizer.json"),
        (XL(**SIZE), "abd", "another vocabulary"),
    ],
    ids=["width", "heads", "head", "architecture", "more-characters", "other-characters"],
)
def test_what_does_not_fit_is_refused(source: Any, characters: str, message: str) -> None:
    tokenizer = CharacterTokenizer("abc")
    model = LanguageModel(tokenizer.vocab_size, FeedbackConfig(**SIZE))
    before = model.fingerprint()
    with pytest.raises(MemspanError, match=message) as caught:
        initialise_from(model, tokenizer, run_of(source, CharacterTokenizer(characters)))
    assert "\n" not in str(caught.value)
    assert model.fingerprint() == before


def test_training_starts_from_the_run(tiny_text: None) -> None:
    """On another text, with the run's tokeniser: a learning rate of zero leaves its weights."""
    still = OptimConfig(learning_rate=0.0, min_learning_rate=0.0)
    data = DataConfig("text.txt", "characters")
    memspan.train(dataclasses.replace(tiny_runs.options(XL(**SIZE), still), data=data), "xl")
    Path("other.txt").write_text("some memory " * 200)
    data = DataConfig("other.txt", "xl/tokenizer.json")
    config = dataclasses.replace(tiny_runs.options(FeedbackConfig(**SIZE), still), data=data)
    memspan.train(config, "feedback", init_from="xl")
    ours, theirs = (memspan.load(name).model.state_dict() for name in ("feedback", "xl"))
    for name in ("embedding.tables.0", "backbone.layers.1.feed_forward.inner.weight"):
        assert torch.equal(ours[name], theirs[name])
    with pytest.raises(MemspanError, match="no run at"):
        memspan.train(config, "other", init_from="none")
