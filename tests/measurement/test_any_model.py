"""Any model that carries state, measured: models of known span behind the adapter."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import known_spans
from memspan.measurement import span, stateful
from memspan.measurement.stateful import StatefulSubject
from memspan.measurement.subject import Budget, RunSubject
from memspan.models.stateful import CarriesMemory

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
    subject, segment = adapted(own), own.segment(np.array([300, 400, 500]), 40)
    found = subject.losses(segment, subject.cuts(40, 3), last=20)
    monkeypatch.setattr(stateful, "MOST_SCORES", 1)
    assert np.allclose(found, subject.losses(segment, subject.cuts(40, 3), last=20), atol=1e-5)
