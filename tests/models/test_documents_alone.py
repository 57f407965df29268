"""Law 8 where text is read: a document is trained on and scored as if it were alone."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from architectures import CASES, VOCABULARY
from memspan.data.options import DataConfig
from memspan.data.prepared import prepare
from memspan.data.streams import START
from memspan.data.tokenizers.plain import ByteTokenizer
from memspan.evaluation import score_tokens
from memspan.models import LanguageModel
from memspan.models.transformer_xl.config import TransformerXLConfig
from memspan.runs.options import RunConfig
from memspan.training.options import TrainConfig
from memspan.training.state import TrainingState
from memspan.training.updates import Updater
from memspan.training.validation import Validation

LENGTHS = (5, 1, 9, 4, 12)


@pytest.mark.parametrize(
    ("name", "segment_length"),
    [
        ("xl-fixed", 4),
        ("feedback", 4),
        ("fast-delta", 4),
        # What these see within a document depends on where it is cut.
        ("xl-segment", sum(LENGTHS)),
        ("compressive", sum(LENGTHS)),
    ],
)
def test_a_document_is_scored_as_alone(name: str, segment_length: int) -> None:
    """In one stream; without document starts the text is read on."""
    model = CASES[name].model()
    random = np.random.default_rng(0)
    documents = [random.integers(VOCABULARY, size=n) for n in LENGTHS]
    text = np.concatenate(documents)
    starts = np.cumsum([0, *LENGTHS[:-1]])

    def nats(tokens: np.ndarray, **options: Any) -> float:
        length = min(segment_length, len(tokens))
        return score_tokens(model, tokens, ByteTokenizer(), segment_length=length, **options).nats

    alone = sum(nats(document) for document in documents)
    assert nats(text, document_starts=starts) == pytest.approx(alone, rel=1e-9)
    assert nats(text) != pytest.approx(alone, rel=1e-3)


def losses_alone(model: LanguageModel, document: np.ndarray) -> Tensor:
    targets = torch.from_numpy(document.astype(np.int64))[None]
    inputs = torch.cat([torch.full((1, 1), START), targets[:, :-1]], 1)
    return model(inputs, targets=targets).losses[0]


def test_training_reads_documents_as_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every loss of the training text and the validation score, with documents cut anywhere."""
    monkeypatch.setenv("MEMSPAN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    for n in range(200):
        (tmp_path / f"texts/{n}.txt").write_text(f"text {n} " * (1 + n % 3))
    small = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 32, "memory_length": 8}
    options = RunConfig(
        model=TransformerXLConfig(**small, attention_span="fixed"),
        data=DataConfig(corpus=str(tmp_path / "texts"), document_reset=True),
        train=TrainConfig(batch_size=1, segment_length=7, device="cpu"),
    )
    prepared = prepare(options.data.corpus, "bytes", None)
    state = TrainingState(options, prepared, torch.device("cpu"))
    model, updater = state.model.eval(), Updater(state)

    def expected(split: str) -> Tensor:
        text = prepared.splits[split]
        edges = text.document_starts[:9].tolist()
        assert len(edges) == 9
        parts = [text.tokens[low:high] for low, high in pairwise(edges)]
        return torch.cat([losses_alone(model, document) for document in parts])

    found = []
    with torch.no_grad():
        wanted = expected("train")
        for _ in range(len(wanted) // 7):
            output = updater.read(state.streams.next())
            state.memory = output.memory
            found.append(output.losses[0])
        wanted = wanted[: 7 * len(found)]
        torch.testing.assert_close(torch.cat(found), wanted, rtol=1e-4, atol=1e-5)
        wanted = expected("validation")
    some = dataclasses.replace(options.train, evaluate_tokens=len(wanted))
    state.config = dataclasses.replace(options, train=some)
    assert Validation(state).score(1).nats == pytest.approx(wanted.sum().item(), rel=1e-4)
