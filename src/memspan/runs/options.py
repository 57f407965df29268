"""All options of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, TypeVar

import tyro

from memspan.checks import check_types
from memspan.data.options import DataConfig
from memspan.errors import MemspanError
from memspan.models.options import BackboneConfig, EmbeddingConfig
from memspan.models.registry import MODELS
from memspan.training.options import OptimConfig, TrainConfig

ModelConfig = TypeVar("ModelConfig", bound=BackboneConfig, covariant=True)
DEFAULT_ARCHITECTURE = next(iter(MODELS))


def _names() -> Any:
    """The type of architecture names, which may be registered after this module was imported."""
    return Literal[tuple(MODELS)]


@dataclass(frozen=True)
class RunConfig(Generic[ModelConfig]):
    """All that defines a training run; what `config.toml` in its folder holds."""

    model: ModelConfig
    architecture: Annotated[
        str,
        tyro.conf.arg(
            name="model",
            constructor_factory=_names,
            help_behavior_hint=f"(default: {DEFAULT_ARCHITECTURE})",
        ),
    ] = DEFAULT_ARCHITECTURE
    """Architecture; --model.* below are its options."""
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        check_types(self)
        if self.architecture not in MODELS:
            *names, last = MODELS
            raise MemspanError(
                f"architecture must be {', '.join(names)} or {last}, not {self.architecture!r}"
            )
        kind = MODELS[self.architecture]
        if not isinstance(self.model, kind):
            raise MemspanError(
                f"architecture {self.architecture} goes with a {kind.__name__}, not a "
                f"{type(self.model).__name__}: change one of them"
            )
        if self.optim.compression_learning_rate != 1 and not kind.has_auxiliary_parameters:
            raise MemspanError(
                "compression_learning_rate belongs to architectures with parameters that an auxiliary "
                f"loss trains, and {self.architecture} has none: drop it"
            )
