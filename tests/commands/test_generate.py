"""Sampling filters, prompts in segments, and evaluation against the plain definition."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from memspan.data.token_files import Identity
from memspan.data.tokenizers.bytes import ByteTokenizer
from memspan.data.tokenizers.registry import train_tokenizer
from memspan.errors import MemspanError
from memspan.evaluation import score_tokens
from memspan.generation.drawing import draw, draw_tokens, probabilities
from memspan.generation.writer import generate, read_prompt
from memspan.models import LanguageModel
from memspan.models.transformer_xl.config import TransformerXLConfig
from memspan.runs.options import RunConfig
from memspan.runs.run import Run
from memspan.sampling import Sampling

SEGMENT = 32

LOGITS = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()


def model() -> LanguageModel:
    torch.manual_seed(0)
    config = TransformerXLConfig(
        n_layers=2, d_model=16, n_heads=2, d_ff=32, memory_length=8, attention_span="fixed"
    )
    return LanguageModel(50, config).double().eval()


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
    ],
)
def test_filters(sampling: Sampling, expected: list[float]) -> None:
    assert probabilities(LOGITS, sampling)[0].tolist() == pytest.approx(expected)


def test_draws_have_their_probabilities() -> None:
    p = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    drawn = draw(p.expand(20_000, -1), torch.Generator().manual_seed(0))
    assert drawn.shape == (20_000, 1)
    shares = drawn[:, 0].bincount(minlength=6) / len(drawn)
    # Never what has none, at either end; the others to four standard errors.
    assert shares.tolist() == pytest.approx(p.tolist(), abs=0.015)
    assert not shares[p == 0].any()


def test_half_a_surrogate_pair_in_a_prompt_is_refused() -> None:
    with pytest.raises(MemspanError, match=r"half a surrogate pair, '.ud800', at character 2"):
        generate("shakespeare", "ab\ud800", tokens=0)


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


@pytest.mark.parametrize(
    "options", [{"temperature": -1}, {"top_k": 0}, {"top_p": 0.0}, {"min_p": 1.5}]
)
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(MemspanError):
        Sampling(**options)  # type: ignore[arg-type]


def test_a_long_prompt_is_read_in_segments_and_everything_is_remembered() -> None:
    m = model()
    prompt = np.arange(2 * SEGMENT + 3) % 50
    reader = m.reader(batch_size=1)
    logits, last = read_prompt(reader, [prompt], SEGMENT)
    assert last == prompt[-1]
    drawn = [ids for ids, _ in draw_tokens(reader, logits, 5, Sampling(seed=3))]
    assert reader.memory.tokens_seen.tolist() == [len(prompt) + 5]
    # The whole text in one call leaves the same memory: what was drawn was read.
    text = torch.tensor([[*prompt.tolist(), *(ids[0] for ids in drawn)]])
    whole = m(text).memory
    torch.testing.assert_close(reader.memory.hidden, whole.hidden)
    again = m.reader(batch_size=1)
    logits, _ = read_prompt(again, np.array_split(prompt, 3), SEGMENT)
    assert drawn == [ids for ids, _ in draw_tokens(again, logits, 5, Sampling(seed=3))]


def test_a_prompt_is_read_as_it_comes() -> None:
    reader = model().reader(batch_size=1)
    read = [0]

    def pieces() -> Iterator[np.ndarray]:
        for n in range(4):
            # Of what came before, less than a segment waits.
            assert n * SEGMENT * 2 - read[0] < SEGMENT
            yield np.zeros(SEGMENT * 2 + 1, np.uint8)

    def counted(tokens: torch.Tensor) -> torch.Tensor:
        read[0] += tokens.shape[1]
        return torch.zeros(*tokens.shape, 50)

    reader.read = counted  # type: ignore[method-assign]
    read_prompt(reader, pieces(), SEGMENT)
    assert read[0] == 4 * (SEGMENT * 2 + 1)


@pytest.mark.parametrize("rows", [1, 3])
def test_scores_are_the_sum_over_every_token(rows: int) -> None:
    m = model()
    text = (np.arange(40) * 7 % 50).astype(np.uint8)
    scores = score_tokens(m, text, ByteTokenizer(), batch_size=rows, segment_length=5)
    parts = np.split(text.astype(np.int64), range(14, 40, 14)) if rows == 3 else [text]
    expected, before = 0.0, 0
    for part in parts:
        inputs = torch.tensor([[before, *part[:-1].tolist()]])
        targets = torch.from_numpy(part.astype(np.int64))[None]
        expected += m(inputs, targets=targets).losses.sum().item()
        before = int(part[-1])
    assert scores.tokens == 40
    assert scores.nats == pytest.approx(expected, rel=1e-9)
    assert scores.bits_per_byte == pytest.approx(expected / math.log(2) / 40)
    assert scores.perplexity == pytest.approx(math.exp(expected / 40))


def test_words_continue_a_prompt_after_a_space() -> None:
    tokenizer = train_tokenizer("words", [b"a b c d"])
    config = TransformerXLConfig(n_layers=1, d_model=8, n_heads=1, d_ff=8, memory_length=4)
    words = LanguageModel(tokenizer.vocab_size, config).eval()
    run = Run(Path("words"), RunConfig(config), tokenizer, words, 0, Identity())
    greedy = Sampling(temperature=0)
    text = generate(run, "a b", tokens=2, sampling=greedy).text
    line = generate(run, "a b\n", tokens=2, sampling=greedy).text
    assert text[0].isspace()
    assert line[0] != " "
    for prompts in ("  ", ["  ", "a"]):
        with pytest.raises(MemspanError, match="prompt is empty"):
            generate(run, prompts)
