"""Options of drawing the next token. No torch here: the command line checks them before it loads."""

from __future__ import annotations

from dataclasses import dataclass

from memspan.calls import Options
from memspan.checks import at_least, check_types
from memspan.errors import MemspanError

LOWEST_TEMPERATURE = 1e-6
"""Logits divided by less may overflow."""


@dataclass(frozen=True)
class Sampling(Options):
    """Options of drawing the next token. The filters apply in the order of the fields."""

    temperature: float = 0.8
    """Divides the logits: lower is less random, 0 always takes the most likely token (greedy)."""
    top_k: int | None = None
    """Draw from the k most likely tokens (None: all)."""
    top_p: float | None = None
    """Draw from the most likely tokens that together have this probability (None: all)."""
    min_p: float | None = None
    """Draw from tokens at least this fraction as likely as the most likely one (None: all)."""
    seed: int | None = None
    """Seed of the random numbers (None: different each time)."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.temperature != 0 and self.temperature < LOWEST_TEMPERATURE:
            raise MemspanError(
                f"temperature must be 0 (greedy) or at least {LOWEST_TEMPERATURE}, not "
                f"{self.temperature}"
            )
        at_least(0, self, "seed")
        at_least(1, self, "top_k")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise MemspanError(f"{name} must lie in (0, 1], not {value}")


DEFAULT = Sampling()
"""The default in signatures."""
