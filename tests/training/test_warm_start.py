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
from memspan.errors import MemspanError
from memspan.lab import cli
from memspan.lab.data.options import DataConfig
from memspan.lab.data.tokenizers.base import Tokenizer
from memspan.lab.data.tokenizers.plain import ByteTokenizer, CharacterTokenizer
from memspan.lab.runs.options import RunConfig
from memspan.lab.runs.run import Run
from memspan.lab.training.options import OptimConfig
from memspan.lab.training.warm_start import initialise_from
from memspan.models import LanguageModel
from memspan.models.feedback.config import FeedbackConfig
from memspan.models.lstm.config import LSTMConfig
from memspan.models.options import EmbeddingConfig
from memspan.models.registry import MODELS
from memspan.models.transformer_xl.config import TransformerXLConfig as XL
from memspan.ops.feedback.attention import Distances, feedback_attention
from memspan.ops.relative import Positions, relative_attention

SIZE: dict[str, Any] = {"n_layers": 2, "d_model": 8, "n_heads": 2, "d_ff": 12, "memory_length": 5}
BYTES = ByteTokenizer()


def run_of(
    model: Any,
    tokenizer: Tokenizer = BYTES,
    embedding: EmbeddingConfig = EmbeddingConfig(),  # noqa: B008
) -> Run:
    made = randomise(LanguageModel(tokenizer.vocab_size, model, embedding), seed=3)
    name = next(name for name, kind in MODELS.items() if type(model) is kind)
    config = RunConfig(model=model, architecture=name, embedding=embedding)  # type: ignore[arg-type]
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
    codes = theirs.span().codes(theirs.config, 7, 5, theirs.one_weight)
    for layer, taken in zip(model.backbone.layers, theirs.stack(), strict=True):
        u = taken.attention.content_bias
        w = taken.attention.position_bias
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
    """Parameters reported as mapped are the source's; those reported as new are as they were."""
    source = run_of(XL(**SIZE, positions="learned", max_distance=4))
    model = feedback_of(projections="per-layer")
    before = {n: t.clone() for n, t in model.state_dict().items()}
    report = initialise_from(model, BYTES, source)
    theirs = {t.sum().item() for t in source.model.state_dict().values()}
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


def test_biases_of_each_layer_do_not_become_those_of_all() -> None:
    source = run_of(XL(**SIZE))
    model = LanguageModel(256, XL(**SIZE, tie_position_biases=True))
    report = initialise_from(model, BYTES, source)
    assert report.fresh
    assert all(name.endswith(("content_bias", "position_bias")) for name in report.fresh)
    for layer in model.backbone.layers:
        assert not layer.attention.content_bias.any()


def test_the_same_architecture_is_taken_whole() -> None:
    source = run_of(FeedbackConfig(**SIZE))
    model = feedback_of()
    report = initialise_from(model, BYTES, source)
    assert report.fresh == report.partly == []
    assert model.fingerprint() == source.model.fingerprint()


@pytest.mark.parametrize(
    ("source", "characters", "message"),
    [
        (XL(**SIZE | {"d_model": 12}), "abc", "same width; set --model.d-model 12"),
        (XL(**SIZE | {"n_heads": 4}, d_head=4), "abc", "--model.n-heads"),
        (XL(**SIZE, d_head=3), "abc", "--model.d-head"),
        (LSTMConfig(n_layers=2, d_model=8), "abc", "weights mean nothing here: .* takes"),
        (FeedbackConfig(**SIZE | {"n_heads": 4}), "abc", "set --model.n-heads 4"),
        (FeedbackConfig(**SIZE, activation="gelu"), "abc", "set --model.activation gelu"),
        (XL(**SIZE, activation="gelu"), "abc", "not trained: set --model.activation gelu"),
        # Another size, and the same size with other words.
        (XL(**SIZE), "abcd", "another vocabulary .* set --data.tokenizer source.tokenizer.json"),
        (XL(**SIZE), "abd", "another vocabulary"),
    ],
    ids=[
        "width",
        "heads",
        "head",
        "architecture",
        "own-heads",
        "own-activation",
        "activation",
        "more-characters",
        "other-characters",
    ],
)
def test_a_source_that_does_not_fit_is_refused(source: Any, characters: str, message: str) -> None:
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


def test_another_option_of_the_function_is_said() -> None:
    source = run_of(XL(**SIZE, normalisation="post"))
    model = randomise(LanguageModel(256, XL(**SIZE | {"memory_length": 9}, clamp_length=3)))
    summary = initialise_from(model, BYTES, source).summary()
    said = "model.clamp_length 3, there None; model.normalisation pre, there post"
    assert f"so that the same weights compute something else: {said}" in summary
    same = initialise_from(LanguageModel(256, source.config.model), BYTES, source).summary()
    assert "not as in that run" not in same


CHARACTERS = CharacterTokenizer("bdf"), CharacterTokenizer("abcdef")


@pytest.mark.parametrize("tie", [True, False])
def test_a_larger_vocabulary_takes_the_rows_of_its_tokens(tie: bool) -> None:
    """Their ids may be others."""
    small, large = CHARACTERS
    embedding = EmbeddingConfig(tie=tie)
    source = run_of(XL(**SIZE), small, embedding=embedding)
    model = LanguageModel(large.vocab_size, XL(**SIZE), embedding)
    report = initialise_from(model, large, source)
    assert report.fresh == report.partly == []
    assert "3 of 7 rows of embedding and output are new" in report.summary()
    old, new = (torch.tensor(t.encode(b"bdfdb").astype(int))[None] for t in (small, large))
    theirs = source.model(old).logits
    ours = model(new).logits
    known = [0, 2, 4, 6]
    assert_same(ours[..., known], theirs, 1e-5, "known characters")
    assert_same(ours[..., 1], theirs.mean(-1), 1e-4, "a new character")
    with pytest.raises(MemspanError, match=r"another vocabulary .* 3 of its tokens .* such as 'a'"):
        initialise_from(LanguageModel(4, XL(**SIZE)), small, run_of(XL(**SIZE), large))


def test_clusters_take_new_tokens_at_the_end_alone() -> None:
    clusters = EmbeddingConfig(cutoffs=(2,), div_val=2)
    source = run_of(XL(**SIZE), CharacterTokenizer("abc"), embedding=clusters)
    for characters, fits in (("abcd", True), ("Xabc", False)):
        tokenizer = CharacterTokenizer(characters)
        model = LanguageModel(tokenizer.vocab_size, XL(**SIZE), clusters)
        if fits:
            assert "1 of 5 rows" in initialise_from(model, tokenizer, source).summary()
            assert torch.equal(model.embedding.tables[1][:2], source.model.embedding.tables[1])
        else:
            with pytest.raises(MemspanError, match="add new tokens after the old ones"):
                initialise_from(model, tokenizer, source)


def test_without_sizes_the_runs_own_are_taken(tiny_text: None, capsys: Any) -> None:
    """The one line that the documentation has, for a run of any width and tokeniser."""
    sizes = ["--model.n-layers=1", "--model.d-model=12", "--model.n-heads=3", "--model.d-ff=8"]
    loop = "--train.steps=1 --train.batch-size=2 --train.segment-length=8 --train.sample-tokens=0"
    short = [*loop.split(), "--train.device=cpu", "--data.corpus=text.txt"]
    cli.main(["train", *sizes, "--data.tokenizer=words", "--out=a", *short])
    Path("text.txt").write_text("some other memory of words " * 200)
    cli.main(["train", "--init-from=a", "--out=b", *short])
    assert (
        "new" not in capsys.readouterr().out.partition("initialised from a")[2].partition("step")[0]
    )
    assert memspan.load("b").config.model == memspan.load("a").config.model
    assert (
        memspan.load("b").tokenizer.vocabulary_hash == memspan.load("a").tokenizer.vocabulary_hash
    )
    cli.main(["train", "--init-from", "a", "--model", "feedback", "--out=c", *short])
    assert memspan.load("c").config.model.d_model == 12
