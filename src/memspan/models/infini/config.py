"""Options of Infini-attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from memspan.checks import at_least, probability
from memspan.errors import MemspanError
from memspan.models.options import HeadsConfig

if TYPE_CHECKING:
    from memspan.models.infini.model import Infini


@dataclass(frozen=True)
class InfiniConfig(HeadsConfig):
    """Infini-attention backbone (Munkhdalai et al. 2024, arXiv 2404.07143)."""

    block_length: int = 64
    """Tokens in a block (the paper's segment). A token attends to its own block up to itself, and
    reads all earlier blocks from a matrix per head. Blocks are counted from a text's first token,
    however it is cut."""
    update: Literal["linear", "delta"] = "linear"
    """Rule for writing a block. linear: add its values. delta: add its values minus those that its
    keys read from the matrix."""
    initialisation: Literal["scaled", "papers"] = "scaled"
    """Initial weights. scaled: each matrix by its width and its role. papers: N(0, 0.02^2) for all."""
    dropout: float = 0.0
    """Dropout probability on embeddings, attention weights and sub-layer outputs."""

    reads_in_blocks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "block_length")
        probability(self, "dropout")
        if self.head_width % 2:
            raise MemspanError(
                f"rotary positions need heads of an even width, not {self.head_width}: change d_model, "
                "n_heads or d_head"
            )

    def build(self) -> Infini:
        from memspan.models.infini.model import Infini

        return Infini(self)
