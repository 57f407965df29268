"""memspan: transformers with memory that read text of any length in constant memory.

All names that users import are here, in :mod:`memspan.models`, :mod:`memspan.ops` and
:mod:`memspan.stateful` and, for other libraries, in :mod:`memspan.integrations.lm_eval` and
:mod:`memspan.integrations.transformers`; other modules are private. A trained model in its folder is
a :class:`Run`, from :func:`train` or :func:`load`, for :func:`evaluate`, :func:`generate` and
:func:`measure`. :func:`estimate` says beforehand what training takes. They do not print; what the user
should know besides a result goes to the logger ``memspan``.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from memspan.errors import MemspanError, NonFiniteError

if TYPE_CHECKING:
    from memspan.converters.convert import convert
    from memspan.data.options import DataConfig
    from memspan.evaluation import Evaluation, evaluate
    from memspan.generation.writer import Generation, Writer, generate
    from memspan.measurement.measure import Measurement, measure
    from memspan.memory import Memory
    from memspan.models import LanguageModel
    from memspan.models.options import EmbeddingConfig
    from memspan.precision import Precision
    from memspan.runs.options import RunConfig
    from memspan.runs.run import Run, load
    from memspan.sampling import Sampling
    from memspan.targets import check
    from memspan.training.estimate import Estimate, estimate
    from memspan.training.options import OptimConfig, TrainConfig
    from memspan.training.start import resume, train

__all__ = [
    "DataConfig",
    "EmbeddingConfig",
    "Estimate",
    "Evaluation",
    "Generation",
    "LanguageModel",
    "Measurement",
    "Memory",
    "MemspanError",
    "NonFiniteError",
    "OptimConfig",
    "Precision",
    "Run",
    "RunConfig",
    "Sampling",
    "TrainConfig",
    "Writer",
    "check",
    "concatenate",
    "convert",
    "estimate",
    "evaluate",
    "generate",
    "load",
    "measure",
    "resume",
    "train",
]
__version__ = "0.1.0"

_HOMES = {
    "DataConfig": "data.options",
    "EmbeddingConfig": "models.options",
    "Estimate": "training.estimate",
    "Evaluation": "evaluation",
    "Generation": "generation.writer",
    "LanguageModel": "models",
    "Measurement": "measurement.measure",
    "Memory": "memory",
    "OptimConfig": "training.options",
    "Precision": "precision",
    "Run": "runs.run",
    "RunConfig": "runs.options",
    "Sampling": "sampling",
    "TrainConfig": "training.options",
    "Writer": "generation.writer",
    "check": "targets",
    "concatenate": "memory",
    "convert": "converters.convert",
    "estimate": "training.estimate",
    "evaluate": "evaluation",
    "generate": "generation.writer",
    "load": "runs.run",
    "measure": "measurement.measure",
    "resume": "training.start",
    "train": "training.start",
}
"""Modules of the names that are imported on first use: torch takes seconds, and help does without."""

# Silent unless the user asks for it; without a handler Python would print warnings.
logging.getLogger("memspan").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memspan' has no attribute {name!r}")
    return getattr(import_module(f"memspan.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
