"""Pictures of a run's metrics."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from memspan.lab.evaluation import Scores
from memspan.lab.training import metrics

figure = pytest.importorskip("matplotlib.figure")


def test_final_scores_are_marked_beside_the_end_of_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As points: with memory emptied nothing was measured before."""
    drawn = []

    def png(on: Callable[..., None], *_: object, **__: object) -> bytes:
        drawn.append(figure.Figure())
        on(drawn[-1])
        return b""

    monkeypatch.setattr(metrics, "png", png)
    records = [{"step": n, "tokens": 100 * n, "train_bits_per_byte": 5.0 - n} for n in range(1, 4)]
    records[-1]["validation_bits_per_byte"] = 2.0
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    scores = {"memory carried": _scored(2.0), "memory emptied": _scored(2.5), "none": None}
    metrics.plot(tmp_path, ends=scores)
    (axes,) = drawn[0].axes
    train, validation, *marked = axes.lines
    assert list(train.get_xdata()) == [100, 200, 300]
    assert validation.get_label() == "validation, best 2.000"
    assert [line.get_label() for line in marked] == [
        "memory carried: 2.000",
        "memory emptied: 2.500",
    ]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in marked] == [
        ([300], [2.0]),
        ([300], [2.5]),
    ]
    # They stand beside one another even where their values are the same, and no letters lie there.
    drawn[0].canvas.draw()
    ends = [line.get_transform().transform((300, 2.0))[0] for line in axes.lines[1:]]
    assert all(right - left > 10 for left, right in pairwise(ends))
    assert not axes.texts


def _scored(bits: float) -> Scores:
    class Scored:
        bits_per_byte = bits

    return Scored()  # type: ignore[return-value]
