"""Options of RWKV-7."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from memspan.checks import at_least
from memspan.models.matrix.options import MatrixConfig
from memspan.models.options import layer_parameters

if TYPE_CHECKING:
    from memspan.models.rwkv_7.model import RWKV7


@dataclass(frozen=True)
class RWKV7Config(MatrixConfig):
    """RWKV-7 "Goose" backbone (Peng et al. 2025, arXiv 2503.14456)."""

    n_heads: int = 4
    """Heads per layer; each has a matrix."""
    activation: Literal["relu", "gelu"] = "relu"
    """Non-linearity of the feed-forward sub-layer, whose result is then squared."""
    decay_rank: int | None = None
    """Rank of the product of two matrices that gives the decays (None: 2.5 sqrt(d_model), rounded
    to a multiple of 32)."""
    rate_rank: int | None = None
    """Rank of the same for in-context learning rates (None: as for decays)."""
    value_rank: int | None = None
    """Rank of the same for mixing in the first layer's values (None: 1.7 sqrt(d_model),
    likewise)."""
    gate_rank: int | None = None
    """Rank of the same for the output gate (None: 5 sqrt(d_model), likewise)."""

    same_function: ClassVar[frozenset[str]] = MatrixConfig.same_function | {
        "decay_rank",
        "rate_rank",
        "value_rank",
        "gate_rank",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "decay_rank", "rate_rank", "value_rank", "gate_rank")

    @property
    def carried_inputs(self) -> tuple[int, int]:
        """The last token of the time mixing and that of the channel mixing."""
        return 1, 2 * self.d_model

    def rank(self, name: str) -> int:
        """Rank of the product ``decay``, ``rate``, ``value`` or ``gate``."""
        given: int | None = getattr(self, f"{name}_rank")
        factor = {"value": 1.7, "gate": 5.0}.get(name, 2.5)
        return max(32, round(factor * self.d_model**0.5 / 32) * 32) if given is None else given

    def build(self) -> RWKV7:
        from memspan.models.rwkv_7.model import RWKV7

        return RWKV7(self)

    def least_parameters(self) -> int:
        inner = 2 * self.n_heads * self.head_width
        return self.n_layers * layer_parameters(self.d_model, inner, self.d_ff)
