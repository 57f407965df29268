"""Models whose span is known by construction, and a text that asks for any distance.

The text: a fact (one of ``A B C D``), then questions, each with its answer: ``A q a q a q a ...`` up to
the next fact. The answer is a function of the last fact, and the models find it by attending to facts
and to nothing else: where theirs is out of reach, all answers are alike to them. The answers
themselves tell them nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from memspan.lab.data.tokenizers.plain import CharacterTokenizer
from memspan.lab.measurement.subject import RunSubject
from memspan.models import (
    CompressiveConfig,
    FastWeightsConfig,
    LanguageModel,
    LSTMConfig,
    TransformerXLConfig,
)
from memspan.models.options import BackboneConfig, EmbeddingConfig

SYMBOLS = "ABCDabcdq"
FACTS = slice(0, 4)
ANSWERS = slice(4, 8)
QUESTION = 8
WIDTH = 16
"""A dimension per symbol, the rest zero."""
SIZES: dict[str, Any] = {
    "n_layers": 1,
    "d_model": WIDTH,
    "n_heads": 1,
    "d_ff": 4,
    "final_norm": False,
}


def text(period: int, n_periods: int) -> np.ndarray:
    """Tokens: a fact every ``period`` tokens."""
    facts = np.random.default_rng(0).integers(4, size=n_periods)
    answers = (np.tile([QUESTION, 4 + fact], period // 2)[: period - 1] for fact in facts)
    return np.concatenate([[fact, *after] for fact, after in zip(facts, answers, strict=True)])


def zeros(config: BackboneConfig) -> LanguageModel:
    """A model that knows its symbols apart, and nothing else."""
    model = LanguageModel(len(SYMBOLS), config, EmbeddingConfig(tie=False, scale=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms and compression functions stay as they begin: the latter are near the mean.
            if not ("norm" in name or "compression" in name):
                parameter.zero_()
        model.embedding.tables[0].copy_(torch.eye(len(SYMBOLS), WIDTH))
    return model.eval()


def subject(config: BackboneConfig, period: int) -> RunSubject:
    """A model of ``config`` with weights set by hand, and the text."""
    model = zeros(config)
    with torch.no_grad():
        model.head.tables[0][ANSWERS, ANSWERS] = 10 * torch.eye(4)
        (layer,) = model.backbone.layers
        attention = layer.attention
        # Head 0 alone: questions and facts meet in its first dimensions.
        attention.value.weight[FACTS, FACTS] = torch.eye(4)
        attention.output.weight[ANSWERS, FACTS] = torch.eye(4)
        if isinstance(config, FastWeightsConfig):
            # Facts are written under one key, which questions read; all else writes next to nothing.
            attention.query.weight[0:2, QUESTION] = 1.0
            attention.key.weight[0:2, FACTS] = 1.0
            attention.beta.weight[0] = -20.0
            attention.beta.weight[0, FACTS] = 60.0
        else:
            attention.query.weight[0, QUESTION] = 30.0
            attention.key.weight[0, FACTS] = 30.0
    return _reading(model, period)


def forgetting(half_life: float, period: int) -> RunSubject:
    """An LSTM of which half is gone after so many tokens, and the text."""
    model = zeros(LSTMConfig(n_layers=1, d_model=WIDTH))
    with torch.no_grad():
        model.head.tables[0][ANSWERS, FACTS] = 3.5 * torch.eye(4)
        (layer,) = model.backbone.layers
        weights = layer.weight_ih_l0.view(4, WIDTH, WIDTH)
        biases = layer.bias_ih_l0.view(4, WIDTH)
        write, keep, value, read = range(4)
        biases[write] = biases[read] = -20
        weights[write, FACTS, FACTS] = weights[value, FACTS, FACTS] = 40 * torch.eye(4)
        weights[read, FACTS, QUESTION] = 40
        biases[keep] = torch.tensor(0.5 ** (1 / half_life)).logit()
    return _reading(model, period)


def _reading(model: LanguageModel, period: int) -> RunSubject:
    # Without a token for unknown ones, which are not scored.
    tokenizer = CharacterTokenizer(SYMBOLS, others=False)
    return RunSubject(model=model, tokenizer=tokenizer, tokens=text(period, 60), segment_length=16)


def transformer_xl(memory_length: int) -> TransformerXLConfig:
    return TransformerXLConfig(**SIZES, memory_length=memory_length)


def compressive(memory_length: int, compressed_length: int) -> CompressiveConfig:
    lengths = {"memory_length": memory_length, "compressed_length": compressed_length}
    how = {"compression": "mean", "compression_rate": 4}
    return CompressiveConfig(**SIZES, **lengths, **how)


def fast_weights() -> FastWeightsConfig:
    return FastWeightsConfig(**SIZES)
