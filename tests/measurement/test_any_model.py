"""Any model that carries state, measured: models of known span behind the adapter."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import known_spans
from memspan.lab.carries_memory import CarriesMemory
from memspan.lab.data.tokenizers.plain import CharacterTokenizer
from memspan.lab.measurement import span, stateful
from memspan.lab.measurement.stateful import StatefulSubject
from memspan.lab.measurement.subject import Budget, RunSubject
from statelaws.protocol import Claims, Inputs

LONG = 1e9
QUESTION = known_spans.QUESTION


def adapted(own: RunSubject, **options: Any) -> StatefulSubject:
    """The same model and text, known by the four functions alone."""
    return StatefulSubject(
        model=CarriesMemory(own.model),
        tokenizer=own.tokenizer,
        tokens=own.tokens,
        segment_length=own.segment_length,
        **options,
    )


def test_a_known_span_is_found_behind_the_adapter() -> None:
    own = known_spans.subject(known_spans.compressive(32, 16), period=256)
    found = next(span.measured(adapted(own), 512, Budget(LONG)))
    assert found.tokens == 128
    assert found.blocks == 8
    same = next(span.measured(own, 512, Budget(LONG)))
    assert np.allclose(found.losses, same.losses, atol=1e-4)


def test_a_window_is_a_span() -> None:
    """The delta rule remembers all that it is shown, which is no more than a window."""
    own = known_spans.subject(known_spans.fast_weights(), period=256)
    found = next(span.measured(adapted(own, window=48), 512, Budget(LONG)))
    assert found.tokens == 64
    beyond = [p.difference.value for p in found.points if p.history > 64]
    assert np.allclose(beyond, 0, atol=1e-6)
    assert not found.beyond


def test_the_last_window_is_read_anew() -> None:
    own = known_spans.subject(known_spans.fast_weights(), period=256)
    subject = adapted(own, window=18, prefix=(QUESTION, QUESTION))
    segment = own.segment(np.array([300, 400]), 50)
    found = subject.losses(segment, subject.cuts(50, 7), last=5)
    # Of 16 tokens and the prefix, and two neighbours in each; the last target is alone.
    for i, end in ((0, 47), (1, 47), (2, 49), (3, 49), (4, 50)):
        whole = dataclasses.replace(
            segment,
            inputs=torch.cat([torch.full((2, 2), QUESTION), segment.inputs[:, end - 16 : end]], 1),
            targets=segment.targets[:, end - 18 : end],
        )
        alone = own.losses(whole, ((0, 18),), 50 - (45 + i))[:, [(45 + i) - end]]
        assert np.allclose(found[:, [i]], alone, atol=1e-5)


def test_few_rows_at_once_are_read_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    own = known_spans.subject(known_spans.transformer_xl(48), period=256)
    subject = adapted(own)
    segment = own.segment(np.array([300, 400, 500]), 40)
    found = subject.losses(segment, subject.cuts(40, 3), last=20)
    monkeypatch.setattr(stateful, "MOST_SCORES", 1)
    assert np.allclose(found, subject.losses(segment, subject.cuts(40, 3), last=20), atol=1e-5)


class Copies:
    """Bets on the token ``lag`` places back; against it, once it has read ``spoilt`` tokens."""

    inputs = Inputs(vocab_size=4)
    claims = Claims()
    module = torch.nn.Module()

    def __init__(self, lag: int, spoilt: int) -> None:
        self.lag = lag
        self.spoilt = spoilt

    def start(self, batch_size: int) -> Tensor:
        return torch.full((batch_size, 0), 0)

    def read(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cat([state, inputs], 1)
        at = torch.arange(state.shape[1], seen.shape[1]) + 1 - self.lag
        bets = 4.0 * torch.nn.functional.one_hot(seen[:, at.clamp(min=0)], 4)
        bets = torch.where((at >= 0)[:, None], bets, 0.0)
        return torch.where((at + self.lag > self.spoilt)[:, None], -bets, bets), seen

    def select(self, state: Tensor, rows: Tensor) -> Tensor:
        return state[rows]

    def copy(self, state: Tensor) -> Tensor:
        return state.clone()


def copying(lag: int, spoilt: int = 10_000) -> StatefulSubject:
    draws = np.random.default_rng(0)
    tokens = draws.integers(4, size=4000)
    for t in range(lag, len(tokens)):
        if draws.random() < 0.9:
            tokens[t] = tokens[t - lag]
    tokenizer = CharacterTokenizer("abcd", others=False)
    return StatefulSubject(
        model=Copies(lag, spoilt), tokenizer=tokenizer, tokens=tokens, segment_length=256
    )


@pytest.mark.parametrize("lag", [5, 8, 16, 32, 64])
def test_a_window_of_a_power_of_two_has_its_own_span(lag: int) -> None:
    found = next(span.measured(copying(lag), 256, Budget(LONG)))
    expected = 1 << (lag - 1).bit_length()
    assert (found.tokens, found.low, found.high) == (expected,) * 3


def test_no_span_is_given_where_the_longest_history_is_worst() -> None:
    found = next(span.measured(copying(4, spoilt=40), 256, Budget(LONG)))
    assert found.tokens is None
    assert min(found.points, key=lambda p: p.bits_per_byte).history in (4, 8, 16, 32)
    # Where it is merely no longer best, there is one.
    assert next(span.measured(copying(4, spoilt=250), 128, Budget(LONG))).tokens == 4
