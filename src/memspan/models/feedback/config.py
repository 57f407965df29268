"""Options of the Feedback Transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from memspan.checks import at_least, probability
from memspan.errors import MemspanError
from memspan.models.options import HeadsConfig, MemoryLength

if TYPE_CHECKING:
    from memspan.models.feedback.model import Feedback


@dataclass(frozen=True)
class FeedbackConfig(HeadsConfig):
    """Feedback Transformer backbone (Fan et al. 2020, arXiv 2002.09402)."""

    memory_length: int = 64
    """Attention span S: a token attends to the memory vectors of the last S tokens. May be lowered at
    evaluation, and raised up to max_distance."""
    max_distance: int | None = None
    """Rows of the position tables: the longest span that can be used (None: memory_length)."""
    projections: Literal["shared", "per-layer"] = "shared"
    """Projections of memory vectors to keys and values: one that all layers share, computed once per
    token, or one per layer."""
    memory_vector: Literal["learned", "last", "mean"] = "learned"
    """A token's memory vector: a learned weighted sum of its hidden states in all layers, the last
    layer's state, or the mean of all."""
    normalisation: Literal["pre", "post"] = "pre"
    """Layer normalisation before each sub-layer, or after the residual sum as in the paper."""
    final_norm: bool = True
    """Normalise the last layer's output (pre-norm only; post-norm already ends in one)."""
    memory_norm: bool = True
    """Normalise memory vectors before they are projected (pre-norm only; with post-norm the states
    are normalised already). Without it they can grow without bound from token to token."""
    attention_bias: bool = False
    """Biases on the value and output projections."""
    value_bias: bool | None = None
    """Bias on the value projections (None: as attention_bias)."""
    adaptive_span: float | None = None
    """Each head learns its own span, up to memory_length (Sukhbaatar et al. 2019). The value is the
    weight of the penalty on long spans, per token of span; the authors used 5e-7 for enwik8 (None: all
    heads have span memory_length). Only the reference implementation supports it, which is several
    times slower."""
    span_ramp: int = 32
    """adaptive_span: tokens over which attention fades out at the end of a head's span."""
    initialisation: Literal["scaled", "papers"] = "scaled"
    """Initial weights. scaled: each matrix by its width and its role. papers: N(0, 0.02^2) for all,
    which suits widths of about 500 to 1,000."""
    dropout: float = 0.0
    """Dropout probability on embeddings, sub-layer outputs and the activations of the feed-forward."""
    attention_dropout: float = 0.0
    """Dropout probability on attention weights."""

    memory_options: ClassVar[type] = MemoryLength
    starts_from: ClassVar[str] = (
        f"{HeadsConfig.starts_from}, or one with softmax attention, such as a transformer-xl"
    )
    # Learned spans are fractions of memory_length, so that it counts.
    same_function: ClassVar[frozenset[str]] = HeadsConfig.same_function | {
        "max_distance",
        "projections",
        "final_norm",
        "memory_norm",
        "value_bias",
        "adaptive_span",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "memory_length", "span_ramp")
        probability(self, "dropout", "attention_dropout")
        at_least(0, self, "adaptive_span")
        if self.adaptive_span is None and self.span_ramp != 32:
            raise MemspanError(
                "span_ramp belongs to adaptive spans: set adaptive_span, or drop span_ramp"
            )
        if self.max_distance is not None and self.memory_length > self.max_distance:
            raise MemspanError(
                f"memory_length {self.memory_length} exceeds the position table's max_distance "
                f"{self.max_distance}: lower memory_length or raise max_distance"
            )

    @property
    def table_rows(self) -> int:
        return self.memory_length if self.max_distance is None else self.max_distance

    @property
    def has_value_bias(self) -> bool:
        """True if values have a bias."""
        return self.attention_bias if self.value_bias is None else self.value_bias

    def build(self) -> Feedback:
        from memspan.models.feedback.model import Feedback

        return Feedback(self)
