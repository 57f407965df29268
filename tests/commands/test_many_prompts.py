"""Several prompts at once, stop strings and log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memspan import concatenate
from memspan.data.token_files import Identity
from memspan.data.tokenizers.bytes import ByteTokenizer
from memspan.errors import MemspanError
from memspan.generation.writer import Sample, Writer, generate
from memspan.models import LanguageModel
from memspan.models.registry import MODELS
from memspan.runs.options import RunConfig
from memspan.runs.run import Run
from memspan.sampling import Sampling
from memspan.training.options import TrainConfig

SEGMENT = 8
GREEDY = Sampling(temperature=0)
LENGTHS: dict[str, dict[str, int]] = {
    "transformer-xl": {"memory_length": 11},
    "compressive": {"memory_length": 8, "compressed_length": 4, "compression_rate": 2},
    "feedback": {"memory_length": 11},
}
architectures = pytest.mark.parametrize("name", MODELS)
PROMPTS = ["", "one", "a sentence of several segments", "two", "seven!!", "eight...", "nine. " * 4]


def tiny(name: str) -> Run:
    torch.manual_seed(0)
    config: Any = MODELS[name](n_layers=2, d_model=16, **LENGTHS.get(name, {}))
    model = LanguageModel(256, config).double().eval()
    for parameter in model.parameters():
        # So that what is written depends on what was read.
        torch.nn.init.normal_(parameter, std=0.5)
    options = RunConfig(config, name, train=TrainConfig(segment_length=SEGMENT))
    return Run(Path("tiny"), options, ByteTokenizer(), model, 0, Identity())


@architectures
def test_each_prompt_is_continued_as_it_would_be_alone(name: str) -> None:
    run = tiny(name)
    before = generate(run, "before that", tokens=0).memory
    together = generate(
        run,
        PROMPTS,
        tokens=6,
        samples=2,
        sampling=GREEDY,
        memory=before,
        log_probabilities=True,
    )
    assert len(together.texts) == together.memory.batch_size == 2 * len(PROMPTS)
    for n, prompt in enumerate(PROMPTS):
        alone = generate(run, prompt, tokens=6, sampling=GREEDY, memory=before)
        for row in (2 * n, 2 * n + 1):
            assert together.texts[row] == alone.text
            assert together.tokens[row] == alone.tokens[0]
            for part, field in alone.memory.tensors().items():
                torch.testing.assert_close(getattr(together.memory[row], part), field, msg=part)


@architectures
def test_log_probabilities_are_the_models(name: str) -> None:
    run = tiny(name)
    text = "some text of a few segments"
    found = generate(run, text, tokens=5, log_probabilities=True, sampling=Sampling(3.0, top_k=9))
    reader = run.model.reader(**run.config.model.writing_options(SEGMENT))
    ids = torch.tensor([[*text.encode()]])
    for segment in ids.split(SEGMENT, 1):
        logits = reader.read(segment)
    assert found.log_probabilities is not None
    for token, value in zip(found.tokens[0], found.log_probabilities[0], strict=True):
        assert value == pytest.approx(logits[0, -1].log_softmax(-1)[token].item(), abs=1e-5)
        logits = reader.read(torch.tensor([[token]]))
    assert generate(run, text, tokens=1).log_probabilities is None


class Letters:
    """A decoder for which token n is the n-th piece."""

    def __init__(self, pieces: list[str]) -> None:
        self.push = pieces.__getitem__


@settings(max_examples=300)
@given(
    st.lists(st.text("ab", max_size=3), min_size=1, max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_a_sample_ends_at_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    sample = Sample(Letters(pieces), stops)  # type: ignore[arg-type]
    shown = [sample.push(n, last=n == len(pieces) - 1) for n in range(len(pieces))]
    whole = ""
    for n, piece in enumerate(pieces):
        whole += piece
        if ends := [whole.index(stop) for stop in stops if stop in whole]:
            whole = whole[: min(ends)]
            assert sample.stopped
            assert len(sample.tokens) == n + 1
            break
    else:
        assert not sample.stopped
    assert "".join(shown) == sample.text == whole


def test_memory_covers_what_was_written_and_no_more() -> None:
    run = tiny("feedback")
    full = generate(run, ["x", "yy"], tokens=12, sampling=GREEDY)
    stop = full.texts[0][4:6]
    writer = Writer(run, ["x", "yy"], tokens=12, sampling=GREEDY, stop=stop)
    shown = ["".join(pieces) for pieces in zip(*writer, strict=True)]
    assert shown == writer.texts
    assert writer.texts[0] == full.texts[0].split(stop)[0]
    for row, prompt in enumerate(["x", "yy"]):
        seen = len(prompt) + len(writer.tokens[row])
        assert writer.memory[row].tokens_seen.tolist() == [seen]
    alone = generate(run, "x", tokens=len(writer.tokens[0]), sampling=GREEDY).memory
    torch.testing.assert_close(writer.memory[0].tensors(), alone.tensors())


def test_mistakes() -> None:
    run = tiny("transformer-xl")
    three = concatenate([run.model.initial_memory(1)] * 3)
    with pytest.raises(MemspanError, match="list of prompts is empty"):
        generate(run, [])
    with pytest.raises(MemspanError, match="3 rows, for 2 prompts: give one row"):
        generate(run, ["a", "b"], memory=three)
    with pytest.raises(MemspanError, match="stop string is empty"):
        generate(run, "a", stop=["x", ""])
