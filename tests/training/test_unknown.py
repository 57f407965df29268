"""Unknown tokens hide text: no score in bits then, and every score says how many they are."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from rich.console import Console

from memspan.lab import cli
from memspan.lab.data.options import DataConfig
from memspan.lab.data.tokenizers.plain import ByteTokenizer
from memspan.lab.data.tokenizers.registry import train_tokenizer
from memspan.lab.evaluation import score_tokens
from memspan.lab.training import metrics, start
from memspan.models import LanguageModel
from tiny_runs import OPTIONS, options

KNOWN = "the quick brown fox jumps over the lazy dog\n" * 200
UNSEEN = "the quick brown fox jumps over the lazy cät\n" * 20
LOOP = {"steps": 4, "segment_length": 8, "evaluate_every": 2, "evaluate_tokens": 0}

pytestmark = pytest.mark.usefixtures("own_folders")


def records(key: str) -> list[dict[str, Any]]:
    return [record for record in metrics.read(Path("run/metrics.jsonl")) if key in record]


@pytest.mark.parametrize(
    ("kind", "training", "text", "n_unknown"),
    [
        ("bytes", b"", "all of it, ä too".encode(), 0),
        ("words", b"a b c\n", b"a d c ee b\n", 2),
        ("characters", b"abc", "abdäbc".encode(), 2),
        ("subwords", b"abc", "abdäbc".encode(), 0),
    ],
)
def test_scores_count_unknown_tokens_and_have_no_bits_then(
    kind: str, training: bytes, text: bytes, n_unknown: int
) -> None:
    if kind == "subwords":
        pytest.importorskip("tokenizers")
    tokenizer = train_tokenizer(kind, [training])
    model = LanguageModel(max(tokenizer.vocab_size, 2), OPTIONS.model).eval()
    scores = score_tokens(model, tokenizer.encode(text), tokenizer, segment_length=4)
    assert scores.n_unknown == n_unknown
    assert scores.unknown_share == n_unknown / scores.tokens
    assert scores.perplexity == pytest.approx(math.exp(scores.nats / scores.tokens))
    assert scores.word_perplexity == pytest.approx(math.exp(scores.nats / len(text.split())))
    if n_unknown:
        assert scores.bits_per_byte is scores.bits_per_character is None
    else:
        decoded = text.decode()
        assert scores.bits_per_byte == scores.nats / math.log(2) / len(text)
        assert scores.bits_per_character == scores.nats / math.log(2) / len(decoded)
    json.dumps(scores.as_dict())


def test_long_texts_are_counted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memspan.lab.data.tokenizers.base.COUNTED", 3)
    tokenizer = train_tokenizer("words", [b"a b"])
    assert tokenizer.count_unknown(tokenizer.encode(b"a x b x x a b x")) == 4
    assert ByteTokenizer().count_unknown(np.zeros(7, np.uint8)) == 0


@pytest.mark.plots
@pytest.mark.parametrize(
    ("text", "vocab_size", "in_training"),
    [(KNOWN + UNSEEN, None, False), (KNOWN, 5, True)],
    ids=["at-the-end", "everywhere"],
)
def test_training_and_evaluation_say_what_is_unknown(
    text: str,
    vocab_size: int | None,
    in_training: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the training text has no such words, and bits per byte."""
    axes = pytest.importorskip("matplotlib.axes")
    plot = mock.create_autospec(axes.Axes.plot, side_effect=axes.Axes.plot)
    monkeypatch.setattr(axes.Axes, "plot", plot)
    monkeypatch.setattr("memspan.lab.training.terminal.PLAIN_SECONDS", 0)
    Path("text.txt").write_text(text)
    data = DataConfig("text.txt", "words", vocab_size)
    console = Console(file=io.StringIO(), record=True, width=1000)
    start.train(dataclasses.replace(options(**LOOP), data=data), "run", console=console)
    said = " ".join(console.export_text().split())
    cli.main(["evaluate", "run", "--json"])
    scores = json.loads(capsys.readouterr().out)
    assert scores["bits_per_byte"] is scores["bits_per_character"] is None
    assert scores["unknown_share"] == scores["n_unknown"] / scores["tokens"] > 0
    share = f"{100 * scores['unknown_share']:.3g}%"

    assert ("(words, 50% unknown)" in said, "bits/byte" in said) == (in_training, not in_training)
    assert f"nats per token ({share} unknown: no bits per byte)" in said
    assert f"memory carried perplexity per token {scores['perplexity']:.2f} memory emptied" in said
    assert "no bits per byte to compare with lzma" in said
    assert f"{share} of the tokens are unknown" in said
    assert "bits per byte   (" not in said
    validations = records("validation_bits_per_byte")
    assert [r["step"] for r in validations] == [2, 4]
    assert {r["validation_bits_per_byte"] for r in validations} == {None}
    assert {r["validation_unknown_share"] for r in validations} == {scores["unknown_share"]}
    (last,) = records("train_bits_per_byte")
    assert (last["train_bits_per_byte"] is None) == in_training
    # Training, validation and the two scores at the end, all in nats per token.
    assert [len(drawn.args[1]) for drawn in plot.call_args_list] == [1, 2, 1, 1]

    cli.main(["evaluate", "run"])
    said = capsys.readouterr().out
    assert f"{scores['n_unknown']:,} ({share})" in said
    assert "no bits per byte or character" in said
    assert said.count("bits per") == 1
    assert f"perplexity per token {scores['perplexity']:10.2f}" in said
