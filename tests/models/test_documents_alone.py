"""Law 8 where text is read: a document is trained on and scored as if it were alone."""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from architectures import CASES, VOCABULARY
from memspan.lab.data.options import DataConfig
from memspan.lab.data.prepared import prepare
from memspan.lab.data.streams import START
from memspan.lab.data.tokenizers.plain import ByteTokenizer
from memspan.lab.evaluation import score_tokens
from memspan.lab.runs.options import RunConfig
from memspan.lab.training.options import TrainConfig
from memspan.lab.training.state import TrainingState
from memspan.lab.training.updates import Updater
from memspan.lab.training.validation import Validation
from memspan.models import LanguageModel
from memspan.models.transformer_xl.config import TransformerXLConfig

LENGTHS = (5, 1, 9, 4, 12)


def losses_alone(model: LanguageModel, documents: list[np.ndarray]) -> Tensor:
    losses = []
    for document in documents:
        targets = torch.from_numpy(document.astype(np.int64))[None]
        inputs = torch.cat([torch.full((1, 1), START), targets[:, :-1]], 1)
        losses.append(model(inputs, targets=targets).losses[0])
    return torch.cat(losses)


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
    score = partial(score_tokens, model, text, ByteTokenizer(), segment_length=segment_length)
    alone = losses_alone(model, documents).sum().item()
    assert score(document_starts=starts).nats == pytest.approx(alone, rel=1e-9)
    assert score().nats != pytest.approx(alone, rel=1e-3)


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
    model = state.model.eval()
    updater = Updater(state)

    def expected(split: str) -> Tensor:
        text = prepared.splits[split]
        edges = text.document_starts[:9].tolist()
        assert len(edges) == 9
        return losses_alone(model, [text.tokens[low:high] for low, high in pairwise(edges)])

    with torch.no_grad():
        wanted = expected("train")
        found = []
        for _ in range(len(wanted) // 7):
            output = updater.read(state.streams.next())
            state.memory = output.memory
            found.append(output.losses[0])
        torch.testing.assert_close(torch.cat(found), wanted[: 7 * len(found)], rtol=1e-4, atol=1e-5)
        wanted = expected("validation")
    some = dataclasses.replace(options.train, evaluate_tokens=len(wanted))
    state.config = dataclasses.replace(options, train=some)
    assert Validation(state).score(1).nats == pytest.approx(wanted.sum().item(), rel=1e-4)
