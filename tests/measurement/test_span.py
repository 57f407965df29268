"""Measurements on models whose span is known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import known_spans
from memspan.lab.measurement import memory_length, span
from memspan.lab.measurement.effective_context import effective_context
from memspan.lab.measurement.span import Span, SpanPoint
from memspan.lab.measurement.statistics import Blocks, Estimate
from memspan.lab.measurement.subject import Budget
from memspan.models.options import BackboneConfig

LONG = 1e9


@pytest.mark.parametrize(
    ("config", "reach"),
    [
        # A question stands anywhere in a segment of 16, so that it reaches M to M + 16 tokens back.
        (known_spans.transformer_xl(48), (48, 64)),
        # M + c C.
        (known_spans.compressive(32, 64), (288, 304)),
    ],
    ids=["xl 48", "compressive 288"],
)
def test_a_known_span_is_found(config: BackboneConfig, reach: tuple[int, int]) -> None:
    subject = known_spans.subject(config, period=512)
    found = next(f for f in span.measured(subject, 1024, Budget(LONG)) if f.targets >= 700)
    assert found.tokens // 2 < reach[1] <= found.tokens, found.points
    assert found.low <= found.tokens <= found.high
    assert not found.beyond


def test_a_history_has_n_tokens_or_up_to_an_eighth_more() -> None:
    """An LSTM that forgets gradually, beside every target read by itself with least and most."""
    subject = known_spans.forgetting(half_life=4, period=64)
    found = next(span.measured(subject, 64, Budget(LONG)))
    targets = (found.first[:, None] + np.arange(span.BLOCK)).ravel()

    def exact(n: int) -> float:
        segment = subject.segment(targets - n + 1, n)
        return float(subject.losses(segment, ((0, n),), 1).mean() / np.log(2))

    histories = [p.history for p in found.points]
    least = [exact(n) for n in histories]
    most = [exact(n + max(n // 8, 1) - 1) for n in histories]
    rounding = span.TOLERANCE / 100
    for point, by_least, by_most in zip(found.points, least, most, strict=True):
        assert by_most - rounding <= point.bits_per_byte <= by_least + rounding
    assert found.tokens == 32


@pytest.mark.parametrize(("skewed", "at_least"), [(False, 0.93), (True, 0.9)])
@pytest.mark.parametrize("n", [8, 64])
def test_intervals_of_few_blocks_cover(skewed: bool, at_least: float, n: int) -> None:
    """In skewed blocks, few targets cost all of the difference."""
    draws = np.random.default_rng(n)
    shape = (1000, n, 64)
    nats = draws.normal(0.05, 1, shape)
    mean = 0.05
    if skewed:
        nats = (draws.random(shape) < 0.03) * draws.lognormal(0, 1, shape)
        mean = 0.03 * np.exp(0.5)
    bits = mean / np.log(2)
    covered = 0
    for sums in nats.sum(2):
        found = Blocks(np.stack([sums, 0 * sums], 1), np.full(n, 64.0)).difference(0, 1)
        covered += found.low <= bits <= found.high
    assert covered >= at_least * 1000


def test_sizes_that_positions_cannot_reach_are_left_out() -> None:
    learned = {"positions": "learned", "max_distance": 32}
    config = dataclasses.replace(known_spans.transformer_xl(8), **learned)
    subject = known_spans.subject(config, 64)
    (option,) = memory_length.sizes(config).items()
    found = list(memory_length.measured(subject, *option, 64, Budget(LONG)))[-1]
    assert [p.slots for p in found.points] == [0, 2, 4, 8, 16]
    assert "position table of 32 rows" in found.impossible[32]


def test_effective_context_counts_what_improves_on_the_best_short_context() -> None:
    """Halving the perplexity of every other token at 4 tokens; the other run, at 2 and by all."""
    nats = np.full((2, 1, 8, 4), 3.0)
    nats[0, 0, ::2, 2:] -= np.log(2)
    nats[1, 0, :, 1:] -= np.log(2)
    points = tuple(SpanPoint(n, 0.0, Estimate(0.0, 0.0, 0.0)) for n in (1, 2, 4, 8))
    spans = {
        name: Span(1, 1, 1, False, 8, 1, points, first=np.array([5]), losses=losses)
        for name, losses in zip(("one", "other"), nats, strict=True)
    }
    one = effective_context({"one": spans["one"]})
    other = effective_context(spans)
    assert one[0].tokens == {0.1: 1, 0.5: 1, 1.0: 1}
    # With the other run there, one never improves on it.
    assert [row.tokens[1.0] for row in other] == [1, 2]


def test_a_difference_that_rounds_to_zero_has_no_minus() -> None:
    assert str(Estimate(-1e-7, -0.25, -2e-9)) == "+0.0000 [-0.2500, +0.0000]"
