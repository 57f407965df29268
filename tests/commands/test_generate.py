"""Sampling filters, prompts in segments and side by side, stop strings, and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from architectures import CASES, ONE_OF_EACH, randomise
from captures import Waits, graphs_on_cpu
from memspan import concatenate
from memspan.errors import MemspanError
from memspan.lab.data.token_files import Identity
from memspan.lab.data.tokenizers.plain import ByteTokenizer
from memspan.lab.data.tokenizers.registry import train_tokenizer
from memspan.lab.generation.drawing import draw, draw_tokens, probabilities
from memspan.lab.generation.writer import Sample, Writer, generate, read_prompt
from memspan.lab.runs.options import RunConfig
from memspan.lab.runs.run import Run
from memspan.lab.sampling import Sampling
from memspan.lab.training.options import TrainConfig
from memspan.models import LanguageModel
from memspan.models.registry import MODELS
from memspan.models.transformer_xl.config import TransformerXLConfig

SEGMENT = 8
GREEDY = Sampling(temperature=0)
architectures = pytest.mark.parametrize("name", MODELS)
PROMPTS = ["", "one", "a sentence of several segments", "two", "seven!!", "eight...", "nine. " * 4]
LOGITS = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()


def tiny(name: str) -> Run:
    """A run whose weights are so large that what is written depends on what was read."""
    config = CASES[ONE_OF_EACH[name]].backbone
    model = randomise(LanguageModel(256, config)).double().eval()
    options = RunConfig(config, name, train=TrainConfig(segment_length=SEGMENT))
    return Run(Path("tiny"), options, ByteTokenizer(), model, 0, Identity())


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1), [0.5, 0.25, 0.125, 0.125]),
        (Sampling(temperature=0), [1, 0, 0, 0]),
        (Sampling(temperature=0.5), [16 / 22, 4 / 22, 1 / 22, 1 / 22]),
        (Sampling(1, top_k=2), [2 / 3, 1 / 3, 0, 0]),
        (Sampling(1, top_k=9), [0.5, 0.25, 0.125, 0.125]),
        (Sampling(1, top_p=0.5), [1, 0, 0, 0]),
        (Sampling(1, top_p=0.51), [2 / 3, 1 / 3, 0, 0]),
        (Sampling(1, min_p=0.5), [2 / 3, 1 / 3, 0, 0]),
        (Sampling(1, top_k=3, min_p=0.4), [2 / 3, 1 / 3, 0, 0]),
        (Sampling(1, top_k=2, top_p=0.6), [1, 0, 0, 0]),
    ],
)
def test_filters_keep_the_right_tokens(sampling: Sampling, expected: list[float]) -> None:
    assert probabilities(LOGITS, sampling)[0].tolist() == pytest.approx(expected)


def test_draws_have_their_probabilities() -> None:
    p = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    drawn = draw(p.expand(20_000, -1), torch.rand(20_000, 1, dtype=torch.float64))
    assert drawn.shape == (20_000, 1)
    shares = drawn[:, 0].bincount(minlength=6) / len(drawn)
    # Never what has none, at either end; the others to four standard errors.
    assert shares.tolist() == pytest.approx(p.tolist(), abs=0.015)
    assert not shares[p == 0].any()


@given(
    st.lists(st.floats(-30, 30), min_size=2, max_size=20),
    st.sampled_from([0.0, 0.1, 1.0, 3.0]),
    st.sampled_from([None, 1, 5]),
    st.sampled_from([None, 1e-6, 0.9, 1.0]),
)
# Different, and equally likely to float32.
@example([-1.2e-38, 0.0], 0.1, None, 1e-6)
def test_a_distribution_always_comes_out(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    p = probabilities(torch.tensor([logits]), sampling)
    assert p.sum().item() == pytest.approx(1, abs=1e-5)
    assert p.isfinite().all()
    # Of the likeliest tokens one at least is never filtered out.
    unfiltered = probabilities(torch.tensor([logits]), Sampling(temperature=temperature))
    assert p[unfiltered == unfiltered.max()].max() > 0


def test_a_prompt_is_read_as_it_comes_and_everything_is_remembered() -> None:
    model = tiny("feedback").model
    reader = model.reader(batch_size=1)
    prompt = np.arange(4 * (2 * SEGMENT + 4))

    def pieces() -> Iterator[np.ndarray]:
        for n, piece in enumerate(np.split(prompt, 4)):
            # Of what came before, less than a segment waits.
            assert n * len(piece) - int(reader.memory.tokens_seen) < SEGMENT
            yield piece

    logits, last = read_prompt(reader, pieces(), SEGMENT)
    assert last == prompt[-1]
    drawn = [ids[0] for ids, _ in draw_tokens(reader, logits, 5, Sampling(seed=3))]
    # As the whole text in one call: what was drawn was read.
    whole = model(torch.tensor([[*prompt, *drawn]]))
    torch.testing.assert_close(logits, whole.logits[:, len(prompt) - 1])
    torch.testing.assert_close(reader.memory.tensors(), whole.memory.tensors())


def test_words_continue_a_prompt_after_a_space() -> None:
    tokenizer = train_tokenizer("words", [b"a b c d"])
    config = TransformerXLConfig(n_layers=1, d_model=8, n_heads=1, d_ff=8, memory_length=4)
    words = LanguageModel(tokenizer.vocab_size, config).eval()
    run = Run(Path("words"), RunConfig(config), tokenizer, words, 0, Identity())
    text = generate(run, "a b", tokens=2, sampling=GREEDY).text
    line = generate(run, "a b\n", tokens=2, sampling=GREEDY).text
    assert text[0].isspace()
    assert line[0] != " "
    for prompts in ("  ", ["  ", "a"]):
        with pytest.raises(MemspanError, match="prompt is empty"):
            generate(run, prompts)


def test_reports_unknown_tokens_of_a_prompt(caplog: pytest.LogCaptureFixture) -> None:
    for kind, says in {
        "characters": "3 of 8 tokens of the prompt are unknown to the run's vocabulary (such as "
        "'x', 'y', 'z'), and",
        "words": "1 of 2 tokens of the prompt is unknown to the run's vocabulary (such as 'xyz'), and",
    }.items():
        tokenizer = train_tokenizer(kind, [b"a b c d"])
        config = CASES[ONE_OF_EACH["lstm"]].backbone
        model = LanguageModel(tokenizer.vocab_size, config).eval()
        run = Run(Path("odd"), RunConfig(config, "lstm"), tokenizer, model, 0, Identity())
        generate(run, ["a b c", "d"], tokens=1)
        assert not caplog.messages
        generate(run, "a    xyz", tokens=1)
        assert caplog.messages[0].startswith(says)
        caplog.clear()


@architectures
def test_each_prompt_is_continued_as_it_would_be_alone(name: str) -> None:
    run = tiny(name)
    before = generate(run, "before that", tokens=0).memory
    how: dict[str, Any] = {"tokens": 6, "sampling": GREEDY, "memory": before}
    together = generate(run, PROMPTS, samples=2, log_probabilities=True, **how)
    assert len(together.texts) == together.memory.batch_size == 2 * len(PROMPTS)
    for n, prompt in enumerate(PROMPTS):
        alone = generate(run, prompt, **how)
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


@pytest.mark.parametrize("name", ["transformer-xl", "kda"])
def test_device_is_waited_for_once_for_many_tokens(name: str) -> None:
    """The same is written as token by token, and by CUDA graphs, which a stand-in replays here."""
    model = tiny(name).model
    start = torch.randn(3, model.vocab_size)
    texts = []
    for ahead, waits in ((1, 12), (5, 3)):
        with graphs_on_cpu():
            reader = model.reader(batch_size=3, cuda_graph=True)
            reader.read(torch.zeros(3, 1, dtype=torch.int64))
            with Waits() as counted:
                drawn = draw_tokens(
                    reader, start, 12, Sampling(top_p=0.9, min_p=0.1, seed=1), ahead
                )
                texts.append([ids for ids, _ in drawn])
        assert counted.names == ["torch.Tensor.tolist"] * waits
    reader = model.reader(batch_size=3)
    reader.read(torch.zeros(3, 1, dtype=torch.int64))
    alone = draw_tokens(reader, start, 12, Sampling(top_p=0.9, min_p=0.1, seed=1))
    assert texts == [[ids for ids, _ in alone]] * 2


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
    """One sample is stopped by a string, while the other goes on."""
    run = tiny("feedback")
    how = {"tokens": 12, "sampling": GREEDY}
    full = generate(run, ["x", "yy"], **how)
    stop = full.texts[1][4:6]
    assert stop not in full.texts[0]
    writer = Writer(run, ["x", "yy"], stop=stop, log_probabilities=True, **how)
    shown = ["".join(pieces) for pieces in zip(*writer, strict=True)]
    assert shown == writer.texts == [full.texts[0], full.texts[1].split(stop)[0]]
    assert writer.log_probabilities is not None
    for row, prompt in enumerate(["x", "yy"]):
        ids = writer.tokens[row]
        assert len(writer.log_probabilities[row]) == len(ids)
        alone = generate(run, prompt, tokens=len(ids), sampling=GREEDY).memory
        assert alone.tokens_seen.tolist() == [len(prompt) + len(ids)]
        torch.testing.assert_close(writer.memory[row].tensors(), alone.tensors())


def test_mistakes_are_refused() -> None:
    run = tiny("transformer-xl")
    three = concatenate([run.model.initial_memory(1)] * 3)
    for says, mistake in {
        "list of prompts is empty": {"prompt": []},
        "3 rows, for 2 prompts: give one row": {"prompt": ["a", "b"], "memory": three},
        "stop string is empty": {"stop": ["x", ""]},
        r"half a surrogate pair, '.ud800', at character 2": {"prompt": "ab\ud800", "tokens": 0},
    }.items():
        with pytest.raises(MemspanError, match=says):
            generate(run, **mistake)
    for name, value in {"temperature": -1, "top_k": 0, "top_p": 0.0, "min_p": 1.5}.items():
        with pytest.raises(MemspanError, match=f"{name} must"):
            Sampling(**{name: value})


def test_pieces_of_a_prompt_that_are_text_are_refused() -> None:
    with pytest.raises(MemspanError, match="pieces of a prompt are bytes"):
        generate("shakespeare", iter("ab"), tokens=1)  # type: ignore[arg-type]
