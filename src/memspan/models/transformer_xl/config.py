"""Options of the Transformer-XL."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from memspan.checks import at_least, check_types, probability
from memspan.errors import MemspanError
from memspan.models.options import (
    BackboneConfig,
    MemoryLength,
    head_width,
    layer_parameters,
)
from memspan.models.relative.options import (
    RelativeReaderOptions,
    check_attention,
    distance_needed,
    longest_segment,
    table_rows,
)

if TYPE_CHECKING:
    from memspan.models.transformer_xl.model import TransformerXL


@dataclass(frozen=True)
class TransformerXLMemoryOptions(MemoryLength):
    """What evaluation may change about a Transformer-XL's first memory."""

    start: Literal["empty", "zeros"] | None = None
    """Memory before the first token. empty: nothing to attend to. zeros: all slots are attended, and
    zero (None: as in training)."""


@dataclass(frozen=True)
class TransformerXLConfig(BackboneConfig):
    """Transformer-XL backbone (Dai et al. 2019, arXiv 1901.02860)."""

    n_layers: int = 4
    """Number of layers."""
    d_model: int = 128
    """Width of the residual stream."""
    n_heads: int = 4
    """Attention heads per layer."""
    d_head: int | None = None
    """Width of one head (None: d_model / n_heads)."""
    d_ff: int = 512
    """Inner width of the feed-forward sub-layer."""
    activation: Literal["relu", "gelu"] = "relu"
    """Non-linearity of the feed-forward sub-layer (the paper: relu)."""
    memory_length: int = 64
    """Memory slots per layer, one per token, M. May be changed at evaluation."""
    attention_span: Literal["segment", "fixed"] = "segment"
    """segment: a token attends to all of memory and to its segment so far. fixed: to exactly the last M
    positions, its own included ("same length"), so that results do not depend on the cuts."""
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    """Position term: the paper's projected sinusoids of the distance, or learned tables."""
    max_distance: int | None = None
    """Rows of the learned position tables: the longest span that can be used, memory and segment
    together (None: what training needs). Only for learned positions."""
    clamp_length: int | None = None
    """Distances over this many tokens share one position code (None: no clamping)."""
    tie_position_biases: bool = False
    """Share the position biases u and v over all layers."""
    normalisation: Literal["pre", "post"] = "pre"
    """Layer normalisation before each sub-layer, or after the residual sum as in the paper."""
    gating: Literal["none", "gru"] = "none"
    """How a sub-layer's output joins the residual stream. none: it is added. gru: through a gate, which
    begins near the identity, as in GTrXL for reinforcement learning (pre-norm only)."""
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
    start: Literal["empty", "zeros"] = "empty"
    """Memory before the first token. empty: nothing to attend to. zeros: all slots are attended and
    zero, as in the checkpoints once distributed through transformers. May be changed at evaluation."""
    norm_epsilon: float = 1e-5
    """Added to the variance in layer normalisation."""

    memory_options: ClassVar[type] = TransformerXLMemoryOptions
    reader_options: ClassVar[type] = RelativeReaderOptions
    same_function: ClassVar[frozenset[str]] = BackboneConfig.same_function | {
        "d_head",
        "memory_length",
        "start",
        "tie_position_biases",
        "final_norm",
    }

    def __post_init__(self) -> None:
        check_types(self)
        at_least(1, self, "n_layers", "d_model", "n_heads", "d_ff")
        at_least(0, self, "memory_length")
        probability(self, "dropout", "attention_dropout")
        at_least(0, self, "norm_epsilon")
        check_attention(self)
        if self.attention_span == "fixed" and self.memory_length < 1:
            raise MemspanError(
                "attention_span fixed sees the last memory_length positions, so memory_length "
                "must be at least 1: raise it, or use attention_span segment"
            )

    @property
    def head_width(self) -> int:
        """Width of one head, K."""
        return head_width(self)

    def build(self) -> TransformerXL:
        from memspan.models.transformer_xl.model import TransformerXL

        return TransformerXL(self)

    def least_parameters(self) -> int:
        inner = self.n_heads * self.head_width
        return self.n_layers * layer_parameters(self.d_model, inner, self.d_ff, table_rows(self))

    def for_segments(self, segment_length: int) -> Self:
        needed = distance_needed(self, self.memory_length, segment_length)
        return self if needed is None else replace(self, max_distance=needed)

    @property
    def longest_segment(self) -> int | None:
        return longest_segment(self, self.memory_length)
