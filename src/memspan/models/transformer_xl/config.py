"""Options of the Transformer-XL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from memspan.checks import at_least
from memspan.models.options import MemoryLength
from memspan.models.relative.options import RelativeConfig

if TYPE_CHECKING:
    from memspan.models.transformer_xl.model import TransformerXL


@dataclass(frozen=True)
class TransformerXLMemoryOptions(MemoryLength):
    """Options of a Transformer-XL's first memory that evaluation may change."""

    start: Literal["empty", "zeros"] | None = None
    """Memory before the first token. empty: nothing to attend to. zeros: all slots are zero, and
    are attended to (None: as in training)."""


@dataclass(frozen=True)
class TransformerXLConfig(RelativeConfig):
    """Transformer-XL backbone (Dai et al. 2019, arXiv 1901.02860)."""

    start: Literal["empty", "zeros"] = "empty"
    """Memory before the first token. empty: nothing to attend to. zeros: all slots are zero, and
    are attended to, as in the checkpoints once distributed through transformers. Reset rows, and
    documents, start empty in either case. May be changed at evaluation."""
    norm_epsilon: float = 1e-5
    """Added to the variance in layer normalisation."""

    memory_options: ClassVar[type] = TransformerXLMemoryOptions
    same_function: ClassVar[frozenset[str]] = RelativeConfig.same_function | {"start"}

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, self, "norm_epsilon")

    def build(self) -> TransformerXL:
        from memspan.models.transformer_xl.model import TransformerXL

        return TransformerXL(self)
