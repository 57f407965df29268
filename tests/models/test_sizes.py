"""Sizes that no machine holds are refused before they take memory or time."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import refused
from memspan.errors import MemspanError
from memspan.lab.data.options import DataConfig
from memspan.lab.data.tokenizers.registry import train_tokenizer
from memspan.lab.runs.options import RunConfig
from memspan.lab.training.estimate import Plan, refuse_oversized_training
from memspan.lab.training.options import TrainConfig
from memspan.models import CompressiveConfig, FeedbackConfig, LanguageModel, sizes
from memspan.models.options import EmbeddingConfig
from memspan.models.registry import MODELS
from memspan.models.transformer_xl.config import TransformerXLConfig
from tiny_runs import model_of

pytestmark = [pytest.mark.hardening, pytest.mark.usefixtures("own_folders")]


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize(
    "changes",
    [
        {"n_layers": 10**8},
        {"n_layers": 20_000, "d_model": 8, "d_ff": 1},
        {"d_model": 10**18},
        {"n_heads": 10**9, "d_model": 2 * 10**9},
    ],
    ids=str,
)
def test_layers_that_do_not_fit(architecture: str, changes: dict[str, int]) -> None:
    config = model_of(architecture, **changes)
    for make in (config.build, partial(LanguageModel, 10, config)):
        with pytest.raises(MemspanError, match=r"lower (it|n_layers)"):
            make()


def test_the_bound_is_below_what_models_have() -> None:
    embedding = EmbeddingConfig(tie=False, cutoffs=(100, 300), div_val=4, d_embed=32)
    for name in MODELS:
        for changes in ({"n_layers": 1, "d_ff": 2000}, {"d_model": 64, "n_heads": 1}):
            config = model_of(name, **changes)
            if name in ("transformer-xl", "compressive"):
                config = dataclasses.replace(config, positions="learned", max_distance=3000)
            for table in (EmbeddingConfig(), embedding):
                with torch.device("meta"):
                    model = LanguageModel(500, config, table)
                count = sum(p.numel() for p in model.parameters())
                assert count / 4 < sizes.parameters(config, 500, table) <= count, name


def test_embeddings_and_memories_that_do_not_fit() -> None:
    config = TransformerXLConfig(n_layers=1, d_model=8, d_ff=8)
    made = LanguageModel(10, config).eval()
    huge = CompressiveConfig(compression_rate=10**18, memory_length=10**18)
    table = FeedbackConfig(n_layers=1, d_model=8, d_ff=8, memory_length=10**15)
    for says, attempt in (
        ("lower n_layers", partial(LanguageModel, 10**12, config)),
        ("lower the number of rows", partial(made.initial_memory, 10**10)),
        ("lower them", partial(made.initial_memory, 1, memory_length=10**15)),
        ("lower the number of rows", partial(made.reader, batch_size=10**10)),
        ("cannot be made in these sizes", partial(LanguageModel, 10, huge)),
        ("lower", partial(LanguageModel, 10, table)),
    ):
        with pytest.raises(MemspanError, match=says):
            attempt()


def test_training_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    config: RunConfig[Any] = RunConfig(TransformerXLConfig())
    plan = Plan(config, 256, torch.device("cpu"))
    refuse_oversized_training(plan)
    long = dataclasses.replace(config, train=TrainConfig(segment_length=10**6, batch_size=100))
    with pytest.raises(MemspanError, match="activations"):
        refuse_oversized_training(Plan(long, 256, torch.device("cpu")))
    # The weights would fit, and nothing else.
    one = 4.0 * sizes.parameters(config.model, 256)
    monkeypatch.setattr(sizes, "_machine_memory", lambda: 2 * one)
    with pytest.raises(MemspanError, match="gradients"):
        refuse_oversized_training(plan)


def test_a_model_of_shapes_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "_machine_memory", lambda: 1000.0)
    with torch.device("meta"):
        LanguageModel(10, TransformerXLConfig())
    with pytest.raises(MemspanError, match="lower n_layers"):
        LanguageModel(10, TransformerXLConfig())


@pytest.mark.parametrize("size", [10**9, 2**63 - 1])
def test_vocabularies_that_no_machine_holds(size: int) -> None:
    """The sub-word library aborts the process."""
    options = partial(DataConfig, "x", "subwords", size)
    for make in (options, partial(train_tokenizer, "subwords", [b"x"], size)):
        with pytest.raises(MemspanError, match="vocab_size must be at most 16,777,216"):
            make()


@pytest.mark.parametrize("flag", ["--model.n-layers", "--train.batch-size"])
def test_the_command_line_says_so(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.txt").write_text("some text " * 500)
    start = ["train", "--data.corpus", "text.txt", "--train.device", "cpu"]
    assert "lower" in refused(capsys, *start, flag, "10000000000")
