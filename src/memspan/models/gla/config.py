"""Options of gated linear attention, and of RetNet's retention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from memspan.checks import at_least
from memspan.errors import MemspanError
from memspan.models.matrix.options import MatrixConfig
from memspan.models.options import layer_parameters

if TYPE_CHECKING:
    from memspan.models.gla.model import GLA


@dataclass(frozen=True)
class GLAConfig(MatrixConfig):
    """Gated linear attention (Yang et al. 2023, arXiv 2312.06635), or retention (RetNet, Sun et
    al. 2023, arXiv 2307.08621)."""

    n_heads: int = 4
    """Heads per layer; each has a matrix."""
    d_head: int | None = None
    """Width of a query or key (None: d_model / n_heads / 2, rounded up)."""
    d_value: int | None = None
    """Width of a value (None: d_model / n_heads)."""
    decay: Literal["gated", "retention"] = "gated"
    """gated: each token chooses a decay for each channel of a key. retention: constant decays, as
    in RetNet: 1 - 1/32 in the first head, and half as far from 1 in each further head."""
    decay_rank: int = 16
    """gated: rank of the product of two matrices that gives the decays."""
    decay_temperature: float = 16.0
    """gated: a decay is the sigmoid raised to the power of one over this; larger keeps memory
    longer."""

    same_function: ClassVar[frozenset[str]] = MatrixConfig.same_function | {
        "d_value",
        "decay_rank",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "d_value", "decay_rank")
        if self.decay_temperature <= 0:
            raise MemspanError(
                f"decay_temperature must be above 0, not {self.decay_temperature}: a decay is the "
                "sigmoid to the power of one over it, in (0, 1)"
            )
        own = {"decay_rank": 16, "decay_temperature": 16.0}
        for name, default in own.items():
            if self.decay == "retention" and getattr(self, name) != default:
                raise MemspanError(
                    f"{name} belongs to decay gated, not retention: drop it, or change decay"
                )

    @property
    def head_width(self) -> int:
        return -(-self.d_model // (2 * self.n_heads)) if self.d_head is None else self.d_head

    @property
    def value_width(self) -> int:
        """Width of a value, V."""
        return self.d_model // self.n_heads if self.d_value is None else self.d_value

    @property
    def matrices(self) -> tuple[int, int, int]:
        return self.n_heads, self.head_width, self.value_width

    def build(self) -> GLA:
        from memspan.models.gla.model import GLA

        return GLA(self)

    def least_parameters(self) -> int:
        inner = self.n_heads * (self.head_width + self.value_width)
        return self.n_layers * layer_parameters(self.d_model, inner, self.d_ff)
