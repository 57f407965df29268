"""Options of DeltaProduct."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memspan.checks import at_least
from memspan.models.matrix.options import DeltaConfig

if TYPE_CHECKING:
    from memspan.models.delta_product.model import DeltaProduct


@dataclass(frozen=True)
class DeltaProductConfig(DeltaConfig):
    """DeltaProduct backbone (Siems et al. 2025, arXiv 2502.10297)."""

    n_householder: int = 2
    """Steps of the delta rule per token, n, each with its own key, value and beta. 1: DeltaNet, or
    with decay Gated DeltaNet."""
    decay: bool = True
    """Decay each matrix before a token's first step (Gated DeltaProduct)."""
    negative_eigenvalues: bool = True
    """Let beta lie in (0, 2), not in (0, 1): a step may be a reflection, and two steps a
    rotation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "n_householder")

    @property
    def widths(self) -> tuple[int, int, int]:
        # Not by super(), whose properties torch.compile does not read.
        keys = self.n_heads * self.head_width
        values = self.value_heads * self.value_width
        return keys, self.n_householder * keys, self.n_householder * values

    def build(self) -> DeltaProduct:
        from memspan.models.delta_product.model import DeltaProduct

        return DeltaProduct(self)
