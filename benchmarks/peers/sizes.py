"""The sizes that all sides are measured at."""

from __future__ import annotations

from dataclasses import dataclass

VOCAB = 256


@dataclass(frozen=True)
class Size:
    d_model: int
    n_heads: int
    n_layers: int
    d_ff: int
    segment: int
    memory: int
    batch: int


SIZES = {
    "S": Size(128, 4, 6, 512, 64, 64, 16),
    "M": Size(256, 8, 6, 1024, 128, 128, 16),
    "L": Size(256, 8, 2, 1024, 256, 512, 4),
}
