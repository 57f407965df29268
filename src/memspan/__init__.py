"""memspan: transformers with memory that read text of any length in constant memory.

A trained model in its folder is a :class:`Run`, from :func:`train` or :func:`load`, for
:func:`evaluate`, :func:`generate` and :func:`measure`. :func:`estimate` says beforehand what training
takes. They do not print; what the user should know besides a result goes to the logger ``memspan``.
The repository's ``tests/public_names.txt`` lists the public interface.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from memspan._lazy import lazily
from memspan.errors import MemspanError as MemspanError
from memspan.errors import NonFiniteError as NonFiniteError

if TYPE_CHECKING:
    from memspan.lab.checking import check as check
    from memspan.lab.converters.convert import convert as convert
    from memspan.lab.data.options import DataConfig as DataConfig
    from memspan.lab.evaluation import Evaluation as Evaluation
    from memspan.lab.evaluation import evaluate as evaluate
    from memspan.lab.generation.writer import Generation as Generation
    from memspan.lab.generation.writer import Writer as Writer
    from memspan.lab.generation.writer import generate as generate
    from memspan.lab.measurement.measure import Measurement as Measurement
    from memspan.lab.measurement.measure import measure as measure
    from memspan.lab.runs.options import RunConfig as RunConfig
    from memspan.lab.runs.run import Run as Run
    from memspan.lab.runs.run import load as load
    from memspan.lab.runs.saving import save_run as save_run
    from memspan.lab.sampling import Sampling as Sampling
    from memspan.lab.training.estimate import Estimate as Estimate
    from memspan.lab.training.estimate import estimate as estimate
    from memspan.lab.training.options import OptimConfig as OptimConfig
    from memspan.lab.training.options import TrainConfig as TrainConfig
    from memspan.lab.training.start import resume as resume
    from memspan.lab.training.start import train as train
    from memspan.memory import Memory as Memory
    from memspan.memory import concatenate as concatenate
    from memspan.models import LanguageModel as LanguageModel
    from memspan.models.options import EmbeddingConfig as EmbeddingConfig
    from memspan.precision import Precision as Precision

__version__ = "0.1.0"

# Silent unless the user asks for it; without a handler Python would print warnings.
logging.getLogger("memspan").addHandler(logging.NullHandler())

_names, __getattr__, _ = lazily(
    __name__,
    {
        "memspan.lab.converters.convert": ("convert",),
        "memspan.lab.data.options": ("DataConfig",),
        "memspan.lab.evaluation": ("Evaluation", "evaluate"),
        "memspan.lab.generation.writer": ("Generation", "Writer", "generate"),
        "memspan.lab.measurement.measure": ("Measurement", "measure"),
        "memspan.memory": ("Memory", "concatenate"),
        "memspan.models": ("LanguageModel",),
        "memspan.models.options": ("EmbeddingConfig",),
        "memspan.precision": ("Precision",),
        "memspan.lab.runs.options": ("RunConfig",),
        "memspan.lab.runs.run": ("Run", "load"),
        "memspan.lab.runs.saving": ("save_run",),
        "memspan.lab.sampling": ("Sampling",),
        "memspan.lab.checking": ("check",),
        "memspan.lab.training.estimate": ("Estimate", "estimate"),
        "memspan.lab.training.options": ("OptimConfig", "TrainConfig"),
        "memspan.lab.training.start": ("resume", "train"),
    },
)
__all__ = ["MemspanError", "NonFiniteError", *_names]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
