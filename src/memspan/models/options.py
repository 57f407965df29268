"""Options of what all language models have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memspan.checks import at_least, check_types, probability
from memspan.errors import MemspanError


@dataclass(frozen=True)
class EmbeddingConfig:
    """Token embeddings and output head."""

    tie: bool = True
    """Use the embedding table as the output weights."""
    scale: bool = True
    """Multiply embeddings by sqrt(d_model)."""
    d_embed: int | None = None
    """Width of the embedding tables before projection (None: d_model)."""
    cutoffs: tuple[int, ...] = ()
    """Adaptive input and softmax: ids where a new frequency cluster starts (empty: no clusters)."""
    div_val: int = 1
    """Adaptive input and softmax: each further cluster's width is divided by this."""
    tie_projections: Literal["none", "all-but-first", "all"] = "all-but-first"
    """Which clusters' output projections are the embedding's projections."""
    output_dropout: float = 0.0
    """Dropout probability on the last hidden state, before the output head, as in the Transformer-XL
    authors' code."""

    def __post_init__(self) -> None:
        check_types(self)
        probability(self, "output_dropout")
        at_least(1, self, "div_val")
        if self.d_embed is not None:
            at_least(1, self, "d_embed")
        if list(self.cutoffs) != sorted(set(self.cutoffs)) or any(c < 1 for c in self.cutoffs):
            raise MemspanError(
                f"cutoffs must be positive and increasing, not {list(self.cutoffs)}: "
                "give the ids at which a new cluster starts, for example 20000 40000 200000"
            )
