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
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
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


def lazily(name: str, file: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """``__all__``, ``__getattr__`` and ``__dir__`` of the module ``name``, whose names are imported on
    first use: torch takes seconds, and help does without. The names are those that ``file`` imports for
    type checkers."""
    imports = re.compile(r"^    from (\S+) import \(?\s*(\w+) as \2\b", re.MULTILINE)
    found = imports.findall(Path(file).read_text(encoding="utf-8"))
    homes = {each: module for module, each in found}

    def get(wanted: str) -> Any:
        if wanted not in homes:
            # With its name and the module Python adds a guess to the message.
            raise AttributeError(
                f"module {name!r} has no attribute {wanted!r}", name=wanted, obj=sys.modules[name]
            )
        return getattr(import_module(homes[wanted]), wanted)

    return sorted(homes), get, lambda: sorted(homes)


_names, __getattr__, _ = lazily(__name__, __file__)
__all__ = ["MemspanError", "NonFiniteError", *_names]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
