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
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from memspan.errors import MemspanError as MemspanError
from memspan.errors import NonFiniteError as NonFiniteError

if TYPE_CHECKING:
    from memspan.converters.convert import convert as convert
    from memspan.data.options import DataConfig as DataConfig
    from memspan.evaluation import Evaluation as Evaluation
    from memspan.evaluation import evaluate as evaluate
    from memspan.generation.writer import Generation as Generation
    from memspan.generation.writer import Writer as Writer
    from memspan.generation.writer import generate as generate
    from memspan.measurement.measure import Measurement as Measurement
    from memspan.measurement.measure import measure as measure
    from memspan.memory import Memory as Memory
    from memspan.memory import concatenate as concatenate
    from memspan.models import LanguageModel as LanguageModel
    from memspan.models.options import EmbeddingConfig as EmbeddingConfig
    from memspan.precision import Precision as Precision
    from memspan.runs.options import RunConfig as RunConfig
    from memspan.runs.run import Run as Run
    from memspan.runs.run import load as load
    from memspan.sampling import Sampling as Sampling
    from memspan.targets import check as check
    from memspan.training.estimate import Estimate as Estimate
    from memspan.training.estimate import estimate as estimate
    from memspan.training.options import OptimConfig as OptimConfig
    from memspan.training.options import TrainConfig as TrainConfig
    from memspan.training.start import resume as resume
    from memspan.training.start import train as train

__version__ = "0.1.0"

# Silent unless the user asks for it; without a handler Python would print warnings.
logging.getLogger("memspan").addHandler(logging.NullHandler())


def lazily(
    name: str, package: str | None, homes: Mapping[str, Sequence[str]]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """``__all__``, ``__getattr__`` and ``__dir__`` of a module whose names are imported on first use.

    ``homes``: modules of ``package``, and the names in each.
    """
    modules = {each: module for module, names in homes.items() for each in names}

    def get(wanted: str) -> Any:
        if wanted not in modules:
            raise AttributeError(f"module {name!r} has no attribute {wanted!r}")
        return getattr(import_module(f"{package}.{modules[wanted]}"), wanted)

    return sorted(modules), get, lambda: sorted(modules)


_HOMES = {
    "converters.convert": ("convert",),
    "data.options": ("DataConfig",),
    "evaluation": ("Evaluation", "evaluate"),
    "generation.writer": ("Generation", "Writer", "generate"),
    "measurement.measure": ("Measurement", "measure"),
    "memory": ("Memory", "concatenate"),
    "models": ("LanguageModel",),
    "models.options": ("EmbeddingConfig",),
    "precision": ("Precision",),
    "runs.options": ("RunConfig",),
    "runs.run": ("Run", "load"),
    "sampling": ("Sampling",),
    "targets": ("check",),
    "training.estimate": ("Estimate", "estimate"),
    "training.options": ("OptimConfig", "TrainConfig"),
    "training.start": ("resume", "train"),
}
"""Module -> its public names: torch takes seconds, and help does without."""

_names, __getattr__, _ = lazily(__name__, __name__, _HOMES)
__all__ = ["MemspanError", "NonFiniteError", *_names]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
