"""Options of the Feedback Transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from memspan.checks import at_least, check_types, probability
from memspan.errors import MemspanError
from memspan.models.options import (
    BackboneConfig,
    MemoryLength,
    check_heads,
    head_width,
    layer_parameters,
)

if TYPE_CHECKING:
    from memspan.models.feedback.model import Feedback


@dataclass(frozen=True)
class FeedbackConfig(BackboneConfig):
    """Feedback Transformer backbone (Fan et al. 2020, arXiv 2002.09402)."""

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
    """Tokens back that a token sees, the attention span S; one memory vector is kept of each. May be
    lowered at evaluation, and raised up to max_distance."""
    max_distance: int | None = None
    """Rows of the position tables, the longest span in use (None: memory_length)."""
    projections: Literal["shared", "per-layer"] = "shared"
    """Keys and values of the memory vectors: one projection for all layers, so that they are
    computed once, or one for each layer."""
    memory_vector: Literal["learned", "last", "mean"] = "learned"
    """A token's memory vector: its states in all layers by learned weights, its last layer's, or
    their mean."""
    normalisation: Literal["pre", "post"] = "pre"
    """Layer normalisation before each sub-layer, or after the residual sum as in the paper. Only
    pre has a fast path."""
    final_norm: bool = True
    """Normalise the last layer's output (pre-norm only; post-norm already ends in one)."""
    memory_norm: bool = True
    """Normalise memory vectors before they are projected (pre-norm only; with post-norm they are
    sums of normalised states). Without it they can grow from token to token without bound."""
    attention_bias: bool = False
    """Biases on the value and output projections."""
    value_bias: bool | None = None
    """A bias on the value projections alone (None: as attention_bias)."""
    adaptive_span: float | None = None
    """Each head learns how far it looks, up to memory_length (Sukhbaatar et al. 2019). The number is
    the weight of the spans' penalty in the loss, per token of span; the authors' for enwik8 is 5e-7
    (None: all heads look memory_length back). Only the reference knows it."""
    span_ramp: int = 32
    """adaptive_span: tokens over which a head's attention fades out at the end of its span."""
    initialisation: Literal["scaled", "papers"] = "scaled"
    """How weights begin. scaled: each matrix by its width and what it is for. papers: all from
    N(0, 0.02^2), whatever their width, which fits widths near 500 to 1,000."""
    dropout: float = 0.0
    """Dropout probability on embeddings and sub-layer outputs. With dropout, training takes the
    reference, which is several times slower."""
    attention_dropout: float = 0.0
    """Dropout probability on attention weights, likewise."""

    memory_options: ClassVar[type] = MemoryLength

    def __post_init__(self) -> None:
        check_types(self)
        at_least(1, self, "n_layers", "d_model", "n_heads", "d_ff", "memory_length")
        probability(self, "dropout", "attention_dropout")
        at_least(1, self, "span_ramp")
        if self.adaptive_span is not None:
            at_least(0, self, "adaptive_span")
        elif self.span_ramp != 32:
            raise MemspanError(
                "span_ramp belongs to adaptive spans: set adaptive_span, or leave it out"
            )
        check_heads(self)
        if self.max_distance is not None and self.memory_length > self.max_distance:
            raise MemspanError(
                f"memory_length {self.memory_length} exceeds the position table's max_distance "
                f"{self.max_distance}: lower the one or raise the other"
            )

    @property
    def head_width(self) -> int:
        """Width of one head, K."""
        return head_width(self)

    @property
    def table_rows(self) -> int:
        """Rows of a layer's position tables."""
        return self.memory_length if self.max_distance is None else self.max_distance

    def build(self) -> Feedback:
        from memspan.models.feedback.model import Feedback

        return Feedback(self)

    def least_parameters(self) -> int:
        inner = self.n_heads * self.head_width
        return self.n_layers * layer_parameters(self.d_model, inner, self.d_ff, self.table_rows)
