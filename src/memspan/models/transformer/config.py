"""Options of the Transformer baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from memspan.calls import Options
from memspan.checks import at_least, check_types, probability
from memspan.errors import MemspanError
from memspan.models.options import BackboneConfig, layer_parameters

if TYPE_CHECKING:
    from memspan.models.transformer.model import Transformer


@dataclass(frozen=True)
class WindowOptions:
    """Options with which a model without memory sees further back than the segment it reads."""

    window: int | None = None
    """Slide a window of this many tokens over the text: with each segment, as many tokens before it
    as the window has room for are read again. The segment is the stride: a stride of 1 gives each
    token the whole window, at the cost of reading it again for each (None: generation slides a
    window as long as a training segment by single tokens; in evaluation, a token sees only its own
    segment)."""

    def __post_init__(self) -> None:
        check_types(self)
        at_least(1, self, "window")


@dataclass(frozen=True)
class TransformerConfig(Options, BackboneConfig):
    """Transformer backbone (Vaswani et al. 2017) with rotary positions: a baseline without memory."""

    n_layers: int = 4
    """Number of layers."""
    d_model: int = 128
    """Width of the residual stream."""
    n_heads: int = 4
    """Attention heads per layer, which divide d_model among them; the width of each must be
    even."""
    d_ff: int = 512
    """Inner width of the feed-forward sub-layer."""
    activation: Literal["relu", "gelu"] = "relu"
    """Non-linearity of the feed-forward sub-layer."""
    initialisation: Literal["scaled", "papers"] = "scaled"
    """Initial weights. scaled: each matrix by its width. papers: N(0, 0.02^2) for all."""
    dropout: float = 0.0
    """Dropout probability on embeddings, attention weights and sub-layer outputs."""

    reader_options: ClassVar[type] = WindowOptions

    def __post_init__(self) -> None:
        check_types(self)
        at_least(1, self, "n_layers", "d_model", "n_heads", "d_ff")
        probability(self, "dropout")
        if self.d_model % (2 * self.n_heads):
            raise MemspanError(
                f"rotary positions need a d_model divisible by 2 * n_heads, not {self.d_model}"
            )

    def build(self) -> Transformer:
        from memspan.models.transformer.model import Transformer

        return Transformer(self)

    def writing_options(self, segment_length: int) -> dict[str, Any]:
        # Or each token would see itself alone.
        return {"window": segment_length}

    def least_parameters(self) -> int:
        return self.n_layers * layer_parameters(self.d_model, self.d_model, self.d_ff)
