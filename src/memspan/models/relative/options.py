"""Options of the architectures with relative positions: Transformer-XL, Compressive. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from memspan.checks import at_least, check_types, probability
from memspan.errors import MemspanError
from memspan.models.options import HeadsConfig, check_sinusoids


@dataclass(frozen=True)
class RelativeReaderOptions:
    """Options for reading with a trained model that has relative positions."""

    attention_span: Literal["segment", "fixed"] | None = None
    """Reach of a token's attention. segment: all of memory and its segment so far. fixed: exactly as
    many positions as memory has slots (None: as in training)."""
    clamp_length: int | None = None
    """Distances over this many tokens share one position code (None: as in training)."""

    def __post_init__(self) -> None:
        check_types(self)
        at_least(1, self, "clamp_length")


@dataclass(frozen=True)
class RelativeConfig(HeadsConfig):
    """The options that these architectures share, before those of their own."""

    memory_length: int = 64
    """Memory slots per layer, one per token, M. May be changed at evaluation."""
    attention_span: Literal["segment", "fixed"] = "segment"
    """segment: a token attends to all of memory and to its segment so far. fixed: to exactly the last M
    positions, its own included ("same length"), so that results do not depend on the cuts."""
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    """Position term: projected sinusoids of the distance, as in the papers, or learned tables."""
    max_distance: int | None = None
    """Rows of the learned position tables: the longest span that can be used, memory and segment
    together (None: as many as training needs). Only for learned positions."""
    clamp_length: int | None = None
    """Distances over this many positions share one position code (None: no clamping)."""
    tie_position_biases: bool = False
    """Share the position biases u and v over all layers."""
    normalisation: Literal["pre", "post"] = "pre"
    """Layer normalisation before each sub-layer, or after the residual sum as in the paper."""
    gating: Literal["none", "gru"] = "none"
    """Gate between a sub-layer's output and the residual stream. none: they are added. gru: a gate
    that starts near the identity, as in GTrXL for reinforcement learning (pre-norm only)."""
    final_norm: bool = True
    """Normalise the last layer's output (pre-norm only; post-norm already ends in one)."""
    attention_bias: bool = False
    """Biases on the value and output projections."""
    initialisation: Literal["scaled", "papers"] = "scaled"
    """Initial weights. scaled: each matrix by its width and its role. papers: N(0, 0.02^2) for all,
    which suits widths of about 500 to 1,000."""
    dropout: float = 0.0
    """Dropout probability on embeddings, position codes and sub-layer outputs."""
    attention_dropout: float = 0.0
    """Dropout probability on attention weights."""

    reader_options: ClassVar[type] = RelativeReaderOptions
    bfloat16_tokens: ClassVar[bool] = True
    same_function: ClassVar[frozenset[str]] = HeadsConfig.same_function | {
        "memory_length",
        "tie_position_biases",
        "final_norm",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, self, "memory_length")
        at_least(1, self, "max_distance", "clamp_length")
        probability(self, "dropout", "attention_dropout")
        if self.max_distance is not None and self.positions != "learned":
            raise MemspanError(
                f"max_distance belongs to positions learned, not {self.positions}: drop one of them"
            )
        if self.positions == "sinusoidal":
            check_sinusoids(self, "learned")
        if self.gating != "none" and self.normalisation != "pre":
            raise MemspanError(
                f"gating {self.gating} needs normalisation pre, not {self.normalisation}: drop one "
                "of them"
            )
        if self.attention_span == "fixed" and self.memory_length < 1:
            raise MemspanError(
                "attention_span fixed sees the last memory_length positions, so memory_length "
                "must be at least 1: raise it, or use attention_span segment"
            )

    @property
    def slots(self) -> int:
        """Slots of all memory of a layer together."""
        return self.memory_length

    @property
    def table_rows(self) -> int:
        return self.max_distance or 0

    def for_segments(self, segment_length: int) -> Self:
        if self.positions != "learned" or self.max_distance is not None:
            return self
        needed = self.slots + segment_length * (self.attention_span == "segment")
        return replace(self, max_distance=needed)

    @property
    def longest_segment(self) -> int | None:
        if self.max_distance is None or self.attention_span == "fixed":
            return None
        return self.max_distance - self.slots
