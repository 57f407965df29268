"""Options of the Recurrent Memory Transformer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from memspan.calls import Options
from memspan.checks import at_least, check_types, probability
from memspan.errors import MemspanError
from memspan.models.options import BackboneConfig

if TYPE_CHECKING:
    from memspan.models.rmt.model import RMT


@dataclass(frozen=True)
class RMTConfig(Options, BackboneConfig):
    """Recurrent Memory Transformer (Bulatov et al. 2022, arXiv 2207.06881), around any backbone."""

    n_layers: int = 4
    """Number of layers of the backbone."""
    d_model: int = 128
    """Width of the residual stream, and of a memory token."""
    n_heads: int = 4
    """Attention heads per layer, if the backbone has heads."""
    d_ff: int = 512
    """Inner width of the feed-forward sub-layer, if the backbone has one."""
    activation: Literal["relu", "gelu"] = "relu"
    """Non-linearity of the feed-forward sub-layer."""
    backbone: str = "transformer"
    """Architecture that reads each block, starting from an empty memory of its own; its options
    that are not listed here have their defaults."""
    block_length: int = 64
    """Tokens in a block (the paper's segment). They see their own block and, of everything before
    it, only the memory tokens. Blocks are counted from a text's first token, however it is cut."""
    memory_tokens: int = 8
    """Memory tokens: read before a block and written after it, at most block_length."""
    associative: bool = False
    """Write memory tokens to a matrix per layer, which the tokens of later blocks read, instead of
    putting them before the next block (Rodkin et al. 2024, arXiv 2407.04841); with the transformer
    only."""
    d_memory: int = 32
    """Width of the keys and queries of associative memory, before the feature map."""
    initialisation: Literal["scaled", "papers"] = "scaled"
    """Initial weights. scaled: each matrix by its width and its role. papers: N(0, 0.02^2) for all."""
    dropout: float = 0.0
    """Dropout probability of the backbone."""

    reads_in_blocks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        from memspan.models.registry import MODELS

        check_types(self)
        at_least(1, self, "n_layers", "d_model", "block_length", "memory_tokens", "d_memory")
        probability(self, "dropout")
        if self.memory_tokens > self.block_length:
            raise MemspanError(
                f"memory_tokens {self.memory_tokens} are more than the {self.block_length} tokens of a "
                "block: lower memory_tokens, or raise block_length"
            )
        kind = MODELS.get(self.backbone)
        if kind is None:
            raise MemspanError(
                f"there is no backbone {self.backbone!r} to wrap: use one of {', '.join(MODELS)}"
            )
        if kind.reads_in_blocks:
            raise MemspanError(
                f"backbone {self.backbone} carries a memory from block to block already: wrap another, "
                "such as transformer"
            )
        if kind.has_auxiliary_parameters:
            raise MemspanError(
                f"backbone {self.backbone} learns by a loss on its own memory, which is empty at each "
                "block: wrap another, such as transformer-xl"
            )
        if self.associative and self.backbone != "transformer":
            raise MemspanError(
                f"associative memory is within the transformer's layers, not those of {self.backbone}: "
                "use backbone transformer, or leave associative out"
            )
        # It refuses what it cannot be made of.
        self.wrapped()

    def wrapped(self) -> BackboneConfig:
        """Options of the backbone: those here that it has, the rest at their defaults."""
        from memspan.models.registry import MODELS

        kind: Any = MODELS[self.backbone]
        own = {field.name for field in dataclasses.fields(kind)} - {"backbone", "block_length"}
        shared = [field.name for field in dataclasses.fields(self) if field.name in own]
        found: BackboneConfig = kind(**{name: getattr(self, name) for name in shared})
        return found

    def build(self) -> RMT:
        from memspan.models.rmt.model import RMT

        return RMT(self)

    def least_parameters(self) -> int:
        return self.wrapped().least_parameters()
