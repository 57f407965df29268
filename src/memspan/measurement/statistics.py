"""Means of losses over blocks of text, with intervals from resampling the blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from memspan.measurement.subject import SEED

RESAMPLES = 1000


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


class Blocks:
    """Losses of the same blocks under several conditions, compared block by block.

    Args:
        nats: the losses of each block's targets together, ``[N, conditions]``.
        n_bytes: bytes of those targets, ``[N]``.
    """

    def __init__(self, nats: np.ndarray, n_bytes: np.ndarray) -> None:
        bits = nats / math.log(2)
        total = max(n_bytes.sum(), 1.0)
        self.bits_per_byte: np.ndarray = bits.sum(0) / total
        """``[conditions]``."""
        draws = np.random.default_rng(SEED)
        n = len(bits)
        counts = draws.multinomial(n, np.full(n, 1 / n), RESAMPLES)
        self.resampled: np.ndarray = counts @ bits / np.maximum(counts @ n_bytes, 1.0)[:, None]
        """The same of each resample of blocks, ``[RESAMPLES, conditions]``."""

    def difference(self, one: int, other: int) -> Estimate:
        """Bits per byte that condition ``one`` costs more than ``other``."""
        value = self.bits_per_byte[one] - self.bits_per_byte[other]
        low, high = interval(self.resampled[:, one] - self.resampled[:, other])
        return Estimate(float(value), low, high)


def interval(values: np.ndarray) -> tuple[float, float]:
    """Of resampled ``values``, the bounds that 95 % lie between."""
    low, high = np.quantile(values, (0.025, 0.975), method="nearest")
    return float(low), float(high)
