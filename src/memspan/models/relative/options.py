"""What the options of architectures with relative positions share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from memspan.checks import at_least, check_types
from memspan.errors import MemspanError
from memspan.models.options import BackboneConfig, HeadOptions, check_heads, check_sinusoids


@dataclass(frozen=True)
class RelativeReaderOptions:
    """How a trained model with relative positions is read."""

    attention_span: Literal["segment", "fixed"] | None = None
    """What a token attends to. segment: all of memory and its segment so far. fixed: exactly as many
    positions as memory has slots (None: as in training)."""
    clamp_length: int | None = None
    """Distances over this many tokens share one position code (None: as in training)."""

    def __post_init__(self) -> None:
        check_types(self)
        at_least(1, self, "clamp_length")


@runtime_checkable
class RelativeOptions(HeadOptions, Protocol):
    """The options that these architectures share."""

    @property
    def positions(self) -> str: ...
    @property
    def max_distance(self) -> int | None: ...
    @property
    def clamp_length(self) -> int | None: ...
    @property
    def attention_span(self) -> str: ...
    @property
    def normalisation(self) -> str: ...
    @property
    def gating(self) -> str: ...


@runtime_checkable
class RelativeConfig(BackboneConfig, RelativeOptions, Protocol):
    """What :class:`~memspan.models.relative.backbone.RelativeBackbone` is made from."""

    @property
    def head_width(self) -> int: ...
    @property
    def d_ff(self) -> int: ...
    @property
    def activation(self) -> str: ...
    @property
    def final_norm(self) -> bool: ...
    @property
    def attention_bias(self) -> bool: ...
    @property
    def tie_position_biases(self) -> bool: ...
    @property
    def dropout(self) -> float: ...
    @property
    def attention_dropout(self) -> float: ...


def check_attention(config: RelativeOptions) -> None:
    """Raise :class:`MemspanError` for options that contradict one another."""
    check_heads(config)
    at_least(1, config, "max_distance", "clamp_length")
    if config.max_distance is not None and config.positions != "learned":
        raise MemspanError(
            f"max_distance belongs to positions learned, not {config.positions}: drop one of them"
        )
    if config.positions == "sinusoidal":
        check_sinusoids(config, "learned")
    if config.gating != "none" and config.normalisation != "pre":
        raise MemspanError(
            f"gating {config.gating} needs normalisation pre, not {config.normalisation}: drop one "
            "of them"
        )


def table_rows(config: RelativeOptions) -> int:
    """Rows of a layer's learned position tables; 0 for sinusoids."""
    return (config.max_distance or 0) if config.positions == "learned" else 0


def distance_needed(config: RelativeOptions, slots: int, segment_length: int) -> int | None:
    """Rows that learned tables need for segments of this length (None: there is nothing to set).

    ``slots``: of all memory together.
    """
    if config.positions != "learned" or config.max_distance is not None:
        return None
    return slots + segment_length * (config.attention_span == "segment")


def longest_segment(config: RelativeOptions, slots: int) -> int | None:
    """The longest segment that the learned tables cover (None: any)."""
    if config.max_distance is None or config.attention_span == "fixed":
        return None
    return config.max_distance - slots
