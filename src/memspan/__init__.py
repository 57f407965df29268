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
from typing import TYPE_CHECKING

from memspan._lazy import lazily
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
    from memspan.runs.saving import save_run as save_run
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

_names, __getattr__, _ = lazily(
    __name__,
    {
        "memspan.converters.convert": ("convert",),
        "memspan.data.options": ("DataConfig",),
        "memspan.evaluation": ("Evaluation", "evaluate"),
        "memspan.generation.writer": ("Generation", "Writer", "generate"),
        "memspan.measurement.measure": ("Measurement", "measure"),
        "memspan.memory": ("Memory", "concatenate"),
        "memspan.models": ("LanguageModel",),
        "memspan.models.options": ("EmbeddingConfig",),
        "memspan.precision": ("Precision",),
        "memspan.runs.options": ("RunConfig",),
        "memspan.runs.run": ("Run", "load"),
        "memspan.runs.saving": ("save_run",),
        "memspan.sampling": ("Sampling",),
        "memspan.targets": ("check",),
        "memspan.training.estimate": ("Estimate", "estimate"),
        "memspan.training.options": ("OptimConfig", "TrainConfig"),
        "memspan.training.start": ("resume", "train"),
    },
)
__all__ = ["MemspanError", "NonFiniteError", *_names]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
