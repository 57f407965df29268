"""Options of the Compressive Transformer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from memspan.checks import at_least, check_types, probability
from memspan.errors import MemspanError
from memspan.models.options import (
    BackboneConfig,
    MemoryLength,
    Plot,
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
    from memspan.models.compressive.model import Compressive


@dataclass(frozen=True)
class CompressiveMemoryOptions(MemoryLength):
    """Sizes of both memories."""

    compressed_length: int | None = None
    """Compressed slots per layer (None: as in training)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, self, "compressed_length")


@dataclass(frozen=True)
class CompressiveConfig(BackboneConfig):
    """Compressive Transformer backbone (Rae et al. 2019, arXiv 1911.05507)."""

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
    compressed_length: int = 64
    """Compressed slots per layer, C (0: none). May be changed at evaluation."""
    compression_rate: int = 4
    """Memory slots that are compressed into one, c. Each layer reaches M + c C tokens back."""
    compression: Literal["convolution", "mean", "max", "dilated-convolution", "most-used"] = (
        "convolution"
    )
    """How c slots become one. convolution: kernel and stride c (the paper's best). most-used: pick the
    slot that had received most attention when it left memory."""
    auxiliary_loss: Literal["attention", "auto-encoding", "none"] = "attention"
    """What trains the compression. attention: reconstruct the attention on the compressed slots.
    auto-encoding: reconstruct the slots. none: only the task's loss, see task_gradient."""
    task_gradient: bool = False
    """Let the task's loss train the compression, too. That needs gradients over several segments: set
    train.accumulate and train.gradient_segments to at least 2."""
    attention_span: Literal["segment", "fixed"] = "segment"
    """segment: a token attends to both memories and to its segment so far. fixed: to exactly the last
    M + C slots, its own included."""
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    """Position term: projected sinusoids of the distance in slots, or learned tables."""
    max_distance: int | None = None
    """Rows of the learned position tables: the longest span that can be used, both memories and segment
    together (None: what training needs). Only for learned positions."""
    clamp_length: int | None = None
    """Distances over this many slots share one position code (None: no clamping)."""
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

    memory_options: ClassVar[type] = CompressiveMemoryOptions
    reader_options: ClassVar[type] = RelativeReaderOptions
    same_function: ClassVar[frozenset[str]] = BackboneConfig.same_function | {
        "d_head",
        "memory_length",
        "compressed_length",
        "auxiliary_loss",
        "task_gradient",
        "tie_position_biases",
        "final_norm",
    }
    has_auxiliary_parameters: ClassVar[bool] = True
    plots: ClassVar[tuple[Plot, ...]] = (
        Plot(
            "attention.png",
            "share of attention, mean over layers",
            {part: f"attention_{part}" for part in ("compressed", "memory", "segment")},
        ),
    )

    def __post_init__(self) -> None:
        check_types(self)
        at_least(1, self, "n_layers", "d_model", "n_heads", "d_ff")
        at_least(0, self, "memory_length", "compressed_length")
        probability(self, "dropout", "attention_dropout")
        if self.compression_rate < 2:
            raise MemspanError(
                f"compression_rate must be at least 2, not {self.compression_rate}: at 1 nothing is "
                "compressed, which is transformer-xl with a longer memory"
            )
        if self.memory_length < self.compression_rate - 1:
            raise MemspanError(
                f"memory_length {self.memory_length} is too short to compress "
                f"{self.compression_rate} slots into one: raise it to at least "
                f"{self.compression_rate - 1}, or lower compression_rate"
            )
        check_attention(self)
        learns = "convolution" in self.compression and self.compressed_length > 0
        if learns and self.auxiliary_loss == "none" and not self.task_gradient:
            raise MemspanError(
                f"with auxiliary_loss none nothing would train the {self.compression}: set "
                "task_gradient, choose an auxiliary loss, or compression mean, max or most-used"
            )

    @property
    def head_width(self) -> int:
        """Width of one head, K."""
        return head_width(self)

    def build(self) -> Compressive:
        from memspan.models.compressive.model import Compressive

        return Compressive(self)

    def least_parameters(self) -> int:
        inner = self.n_heads * self.head_width
        return self.n_layers * layer_parameters(self.d_model, inner, self.d_ff, table_rows(self))

    def for_segments(self, segment_length: int) -> Self:
        needed = distance_needed(self, self.memory_length + self.compressed_length, segment_length)
        return self if needed is None else replace(self, max_distance=needed)

    @property
    def longest_segment(self) -> int | None:
        return longest_segment(self, self.memory_length + self.compressed_length)
