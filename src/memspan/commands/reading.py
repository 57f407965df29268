"""Options that evaluate, generate and measure share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from memspan.checks import check_types
from memspan.commands.parsing import Modules
from memspan.precision.options import MatmulPrecision, Products, refuse_contradictory_precision
from memspan.runs.places import SHIPPED

if TYPE_CHECKING:
    from memspan.precision.products import Precision
    from memspan.runs.run import Run

RUN_HELP = (
    "Run folder, for its best weights; one of its checkpoints, such as RUN/checkpoints/step-750; or, "
    f"where there is none, a run that comes with memspan: {', '.join(SHIPPED)}."
)
TARGET_HELP = (
    f"A run, by folder or of those that come with memspan ({', '.join(SHIPPED)}); a run's checkpoint, "
    "such as RUN/checkpoints/step-750; a preset; a folder in transformers' format; transformers:TYPE, "
    "made small and random, such as transformers:mamba; or FILE.py:NAME, a model or a function that "
    "makes one."
)


@dataclass(frozen=True)
class DeviceArguments:
    """Where and how precisely trained models are read."""

    device: str = "auto"
    """auto, cpu, cuda, ..."""
    precision: Products = "auto"
    """Precision of matrix products: auto is float32. On a CPU without AVX-512 bfloat16 is slow, except
    for single tokens of transformer-xl and compressive, which are faster if the model is large."""
    matmul_precision: MatmulPrecision = "auto"
    """How products of float32 are computed (auto: as in training). See memspan train --help."""

    modules: Modules = ()

    def __post_init__(self) -> None:
        check_types(self)
        refuse_contradictory_precision(self.precision, self.matmul_precision)


@dataclass(frozen=True)
class ReadingArguments(DeviceArguments):
    """A run and how it is read."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(help=RUN_HELP)] = field(kw_only=True)

    def opened(self) -> tuple[Run, Precision]:
        """The run, and the precision to read in. Imports torch."""
        from memspan.devices import device_for
        from memspan.runs.run import load, precision_for

        run = load(self.run, str(device_for(self.device)))
        return run, precision_for(run, self.precision, self.matmul_precision)
