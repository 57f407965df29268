"""Options of Gated DeltaNet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from memspan.checks import at_least, probability
from memspan.errors import MemspanError
from memspan.models.options import HeadsConfig, layer_parameters

if TYPE_CHECKING:
    from memspan.models.gated_delta_net.model import GatedDeltaNet


@dataclass(frozen=True)
class GatedDeltaNetConfig(HeadsConfig):
    """Gated DeltaNet backbone (Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464)."""

    n_heads: int = 4
    """Heads of queries and keys per layer."""
    n_value_heads: int | None = None
    """Heads of values, each with a matrix of its own: a multiple of n_heads, which share them evenly
    (None: n_heads)."""
    d_head: int | None = None
    """Width of a query or key (None: d_model / n_heads)."""
    d_value: int | None = None
    """Width of a value (None: that of a key). The paper has twice that."""
    convolution: int = 4
    """Tokens that the convolutions of queries, keys and values reach over, their own included."""
    negative_eigenvalues: bool = False
    """beta lies in (0, 2), not in (0, 1): a write may turn the sign of what its key held (Grazzi et al.
    2024, arXiv 2411.12537)."""
    chunk_size: int = 32
    """Tokens that are computed at once where chunks in C cannot run; results do not depend on it."""
    recompute: bool = False
    """Train with less memory in more time, by recomputing most of the recurrence in the backward
    pass."""
    initialisation: Literal["scaled", "papers"] = "scaled"
    """Initial weights. scaled: each matrix by its width and its role. papers: N(0, 0.02^2) for all."""
    dropout: float = 0.0
    """Dropout probability on embeddings and sub-layer outputs."""

    same_function: ClassVar[frozenset[str]] = HeadsConfig.same_function | {
        "n_value_heads",
        "d_value",
        "convolution",
        "chunk_size",
        "recompute",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "n_value_heads", "d_value", "convolution", "chunk_size")
        probability(self, "dropout")
        if self.value_heads % self.n_heads:
            raise MemspanError(
                f"n_value_heads {self.value_heads} is not a multiple of n_heads {self.n_heads}, which "
                "share them: change one of them"
            )

    @property
    def value_heads(self) -> int:
        """Heads of values, H."""
        return self.n_heads if self.n_value_heads is None else self.n_value_heads

    @property
    def value_width(self) -> int:
        """Width of a value, V."""
        return self.head_width if self.d_value is None else self.d_value

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of all queries, keys and values together."""
        keys = self.n_heads * self.head_width
        return keys, keys, self.value_heads * self.value_width

    def build(self) -> GatedDeltaNet:
        from memspan.models.gated_delta_net.model import GatedDeltaNet

        return GatedDeltaNet(self)

    def least_parameters(self) -> int:
        inner = sum(self.widths) // 2 + self.widths[-1]
        return self.n_layers * layer_parameters(self.d_model, inner, self.d_ff)
