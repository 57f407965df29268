"""The reach of a stack, as the pages say it: by formula, and by brute force."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from memspan.models import Compressive, CompressiveConfig, TransformerXL, TransformerXLConfig


def reach(layers: int, slots: int, segment: int) -> int:
    """Tokens that the last token of a segment depends on, itself included: T + M + (L - 1) T ⌈M / T⌉.

    Each layer but the first sees slots that were computed when the segment of the oldest one was read,
    which began up to T - 1 tokens before that slot.
    """
    return segment + slots + (layers - 1) * segment * math.ceil(slots / segment)


def first_of(backbone: TransformerXL | Compressive, segment: int, n_segments: int) -> int:
    """The oldest token that changes the last output. Row i has another token i than the last row."""
    length = segment * n_segments
    d_model = backbone.config.d_model
    x = torch.randn(1, length, d_model, dtype=torch.float64).repeat(length + 1, 1, 1)
    x[range(length), range(length)] = torch.randn(length, d_model, dtype=torch.float64)
    memory = None
    for part in x.split(segment, dim=1):
        output = backbone.double()(part, memory)
        memory = output.memory.detach()
    last = output.hidden[:, -1]
    return int(((last - last[-1]).abs().amax(-1) > 1e-13).nonzero().min())


@pytest.mark.parametrize(
    ("layers", "slots", "segment"),
    [(1, 3, 4), (2, 3, 4), (3, 5, 4), (4, 1, 8), (2, 4, 4), (3, 8, 2), (3, 7, 3), (2, 0, 5)],
)
def test_a_transformer_xl_reaches_as_far_as_the_formula(
    layers: int, slots: int, segment: int
) -> None:
    sizes = {"n_layers": layers, "d_model": 8, "n_heads": 2, "memory_length": slots}
    model = TransformerXL(TransformerXLConfig(**sizes))
    n_segments = math.ceil(reach(layers, slots, segment) / segment) + 2
    first = first_of(model, segment, n_segments)
    assert segment * n_segments - first == reach(layers, slots, segment)


@pytest.mark.parametrize(
    ("layers", "slots", "compressed", "rate", "segment"),
    [(1, 4, 2, 2, 4), (2, 4, 3, 2, 4), (2, 3, 2, 3, 6), (3, 2, 1, 2, 8), (2, 6, 2, 3, 3)],
)
def test_a_compressive_transformer_reaches_as_far_as_the_formula(
    layers: int, slots: int, compressed: int, rate: int, segment: int
) -> None:
    """Each compressed slot stands for c more, where c divides M and T: M + c C in place of M."""
    model = Compressive(
        CompressiveConfig(
            n_layers=layers,
            d_model=8,
            n_heads=2,
            memory_length=slots,
            compressed_length=compressed,
            compression_rate=rate,
            compression="mean",
        )
    )
    expected = reach(layers, slots + rate * compressed, segment)
    n_segments = math.ceil(expected / segment) + 2
    assert segment * n_segments - first_of(model, segment, n_segments) == expected


def test_the_pages_say_how_far_the_measured_models_reach() -> None:
    docs = Path(__file__).parents[2] / "docs"
    table = (docs / "recall.md").read_text(encoding="utf-8")
    picture = (docs / "figures" / "span.svg").read_text(encoding="utf-8")
    for slots in (128, 128 + 4 * 128):
        number = f"{reach(2, slots, 64) - 1:,}"  # tokens back: the token itself is at 0
        assert number in table
        assert f">{number}</text>" in picture
