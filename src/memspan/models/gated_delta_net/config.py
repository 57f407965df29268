"""Options of Gated DeltaNet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from memspan.checks import at_least
from memspan.errors import MemspanError
from memspan.models.matrix.options import DeltaConfig
from memspan.models.options import layer_parameters

if TYPE_CHECKING:
    from memspan.models.gated_delta_net.model import GatedDeltaNet


@dataclass(frozen=True)
class GatedDeltaNetConfig(DeltaConfig):
    """Gated DeltaNet backbone (Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464)."""

    n_heads: int = 4
    """Heads of queries and keys per layer."""
    d_value: int | None = None
    """Width of a value (None: that of a key). The paper has twice that."""
    n_value_heads: int | None = None
    """Heads of values, each with its own matrix: a multiple of n_heads, since these share them
    evenly (None: n_heads)."""

    same_function: ClassVar[frozenset[str]] = DeltaConfig.same_function | {"n_value_heads"}

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "n_value_heads")
        if self.value_heads % self.n_heads:
            raise MemspanError(
                f"n_value_heads {self.value_heads} is not a multiple of n_heads {self.n_heads}, which "
                "share them: change one of them"
            )

    @property
    def value_heads(self) -> int:
        return self.n_heads if self.n_value_heads is None else self.n_value_heads

    def build(self) -> GatedDeltaNet:
        from memspan.models.gated_delta_net.model import GatedDeltaNet

        return GatedDeltaNet(self)

    def least_parameters(self) -> int:
        inner = sum(self.widths) // 2 + self.widths[-1]
        return self.n_layers * layer_parameters(self.d_model, inner, self.d_ff)
