"""Options that evaluate and generate share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from memspan.checks import at_least, check_types
from memspan.precision.options import MatmulPrecision, Products, refuse_contradictory_precision

if TYPE_CHECKING:
    from memspan.precision.products import Precision
    from memspan.runs.run import Run


@dataclass(frozen=True)
class ReadingArguments:
    """A run and how it is read."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder."""
    attention_span: Literal["segment", "fixed"] | None = None
    """What a token sees, for models with relative positions: all of memory and its segment's past, or
    exactly the memory's length (None: as in training)."""
    clamp_length: int | None = None
    """Distances over this share one position code, for the same models (None: as in training)."""
    device: str = "auto"
    """auto, cpu, cuda, ..."""
    precision: Products = "auto"
    """Precision of matrix products: auto is float32. On a CPU without AVX-512 bfloat16 is many times
    slower."""
    matmul_precision: MatmulPrecision = "auto"
    """How products of float32 are computed (auto: as in training). See memspan train --help."""

    def __post_init__(self) -> None:
        check_types(self)
        at_least(1, self, "clamp_length")
        refuse_contradictory_precision(self.precision, self.matmul_precision)

    def opened(self) -> tuple[Run, Precision]:
        """The run, and the precision to read in. Imports torch."""
        from memspan.devices import device_for
        from memspan.runs.reading import precision_for
        from memspan.runs.run import load

        run = load(self.run, str(device_for(self.device)))
        return run, precision_for(run, self.precision, self.matmul_precision)
