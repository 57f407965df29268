"""Options of the Compressive Transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from memspan.checks import at_least
from memspan.errors import MemspanError
from memspan.models.options import MemoryLength, Plot
from memspan.models.relative.options import RelativeConfig

if TYPE_CHECKING:
    from memspan.models.compressive.model import Compressive


@dataclass(frozen=True)
class CompressiveMemoryOptions(MemoryLength):
    """Sizes of both memories."""

    compressed_length: int | None = None
    """Compressed slots per layer (None: as in training)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, self, "compressed_length")


@dataclass(frozen=True)
class CompressiveConfig(RelativeConfig):
    """Compressive Transformer backbone (Rae et al. 2019, arXiv 1911.05507)."""

    attention_span: Literal["segment", "fixed"] = "segment"
    """segment: a token attends to both memories and to its segment so far. fixed: to exactly the last
    M + C slots, its own included."""
    compressed_length: int = 64
    """Compressed slots per layer, C (0: none). May be changed at evaluation."""
    compression_rate: int = 4
    """Memory slots that are compressed into one, c. Each layer reaches M + c C tokens back."""
    compression: Literal["convolution", "mean", "max", "dilated-convolution", "most-used"] = (
        "convolution"
    )
    """Function that turns c slots into one. convolution: kernel and stride c (the paper's best).
    most-used: pick the slot that had received the most attention when it left memory."""
    auxiliary_loss: Literal["attention", "auto-encoding", "none"] = "attention"
    """Loss that trains the compression. attention: reconstruct the attention on the compressed slots.
    auto-encoding: reconstruct the slots. none: only the task's loss, see task_gradient."""
    task_gradient: bool = False
    """Let the task's loss also train the compression. This needs gradients over several segments:
    set train.accumulate and train.gradient_segments to at least 2."""

    memory_options: ClassVar[type] = CompressiveMemoryOptions
    same_function: ClassVar[frozenset[str]] = RelativeConfig.same_function | {
        "compressed_length",
        "auxiliary_loss",
        "task_gradient",
    }
    has_auxiliary_parameters: ClassVar[bool] = True
    plots: ClassVar[tuple[Plot, ...]] = (
        Plot(
            "attention.png",
            "share of attention, mean over layers",
            {part: f"attention_{part}" for part in ("compressed", "memory", "segment")},
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, self, "compressed_length")
        if self.compression_rate < 2:
            raise MemspanError(
                f"compression_rate must be at least 2, not {self.compression_rate}: at 1 nothing is "
                "compressed, which is transformer-xl with a longer memory"
            )
        self.check_memory_length(self.memory_length)
        learns = "convolution" in self.compression and self.compressed_length > 0
        if learns and self.auxiliary_loss == "none" and not self.task_gradient:
            raise MemspanError(
                f"with auxiliary_loss none nothing would train the {self.compression}: set "
                "task_gradient, choose an auxiliary loss, or compression mean, max or most-used"
            )

    def check_memory_length(self, length: int) -> None:
        """Refuse a memory from which no run could be compressed."""
        if length < self.compression_rate - 1:
            raise MemspanError(
                f"memory_length {length} is too short to compress {self.compression_rate} slots into "
                f"one: raise it to at least {self.compression_rate - 1}"
            )

    @property
    def slots(self) -> int:
        return self.memory_length + self.compressed_length

    @property
    def needs_received(self) -> bool:
        """True if compressing asks how much attention each slot received."""
        return self.compression == "most-used" and self.compressed_length > 0

    def build(self) -> Compressive:
        from memspan.models.compressive.model import Compressive

        return Compressive(self)
