"""Options of Mamba-2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from memspan.checks import at_least
from memspan.errors import MemspanError
from memspan.models.matrix.options import ConvolvedConfig

if TYPE_CHECKING:
    from memspan.models.mamba_2.model import Mamba2


@dataclass(frozen=True)
class Mamba2Config(ConvolvedConfig):
    """Mamba-2 backbone (Dao and Gu 2024, arXiv 2405.21060)."""

    n_heads: int = 4
    """Heads per layer; each has a matrix, the state."""
    d_head: int | None = None
    """Width of a head, P (None: 2 * d_model / n_heads)."""
    d_state: int = 32
    """Width of the state, N: rows of a matrix. The paper has 64 to 256."""
    n_groups: int = 1
    """Groups of heads that share B and C: a divisor of n_heads."""
    d_ff: int = 0
    """Inner width of the feed-forward sub-layer (0: none, as in the paper)."""

    same_function: ClassVar[frozenset[str]] = ConvolvedConfig.same_function | {"d_state"}
    least_d_ff: ClassVar[int] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "d_state", "n_groups")
        if self.n_heads % self.n_groups:
            raise MemspanError(
                f"n_groups {self.n_groups} does not divide n_heads {self.n_heads}, which share B and C "
                "by groups: change one of them"
            )

    @property
    def head_width(self) -> int:
        return 2 * self.d_model // self.n_heads if self.d_head is None else self.d_head

    @property
    def widths(self) -> tuple[int, int, int]:
        states = self.n_groups * self.d_state
        return states, states, self.n_heads * self.head_width

    @property
    def matrices(self) -> tuple[int, int, int]:
        return self.n_heads, self.d_state, self.head_width

    def build(self) -> Mamba2:
        from memspan.models.mamba_2.model import Mamba2

        return Mamba2(self)
