"""What the architectures with relative positions ask of their options."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from memspan.checks import at_least
from memspan.errors import MemspanError


@runtime_checkable
class RelativeOptions(Protocol):
    """The options that they share."""

    @property
    def d_model(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def d_head(self) -> int | None: ...
    @property
    def positions(self) -> str: ...
    @property
    def max_distance(self) -> int | None: ...


def check_attention(config: RelativeOptions) -> None:
    """Refuse options that contradict one another."""
    if config.d_head is None and config.d_model % config.n_heads:
        raise MemspanError(
            f"d_model {config.d_model} is not divisible by n_heads {config.n_heads}: "
            "change one of them, or set d_head"
        )
    for name in ("d_head", "max_distance", "clamp_length"):
        if getattr(config, name) is not None:
            at_least(1, config, name)
    if config.max_distance is not None and config.positions != "learned":
        raise MemspanError(
            f"max_distance belongs to positions learned, not {config.positions}: drop one of them"
        )
    if config.positions == "sinusoidal" and config.d_model % 2:
        raise MemspanError(
            f"sinusoidal positions need an even d_model, not {config.d_model}: "
            "change it, or use positions learned"
        )
