"""What evaluation and generation need to read with a run."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from memspan.devices import device_for
from memspan.errors import MemspanError
from memspan.memory import Memory
from memspan.precision.options import MatmulPrecision, Products
from memspan.precision.products import Precision, resolve
from memspan.runs.run import Run, load


def opened(run: Run | str | Path) -> Run:
    """The run itself, or the one in that folder, on CUDA where there is one.

    Raises:
        MemspanError: the folder is no run, or a file in it is missing or damaged.
    """
    return run if isinstance(run, Run) else load(run, str(device_for("auto")))


def precision_for(
    run: Run, products: Products = "auto", matmul: MatmulPrecision = "auto"
) -> Precision:
    """The precision to read in: ``auto`` is float32, multiplied as in training.

    What to know about the choice is logged as a warning of the logger ``memspan``.

    Raises:
        MemspanError: the two contradict each other, or the device has no bfloat16.
    """
    trained = run.config.train.matmul_precision
    auto = Precision(matmul="highest" if trained == "auto" else trained)
    device = next(run.model.parameters()).device
    precision = resolve(products, matmul, auto, device)
    for line in precision.notices(device, run.model.float32_part()):
        logging.getLogger("memspan").warning(line)
    return precision


def segment_for(
    run: Run, memory: Memory | None, sizes: Mapping[str, object], reading: Mapping[str, object]
) -> int:
    """Tokens to read at once: as in training, or fewer where the positions of the run's model do not
    reach that far.

    Args:
        run: the run.
        memory: to read on from (None: an empty one).
        sizes: options of the empty one.
        reading: options of the model's reader.
    """
    own = run.config.train.segment_length
    memory = run.model.initial_memory(1, **sizes) if memory is None else memory
    longest_of: Callable[..., int | None] = run.model.backbone.longest_segment
    longest = longest_of(memory, **reading)
    # Where not even one token fits, the reader says what does.
    return own if longest is None else max(min(own, longest), 1)


Options = dict[str, Any]


def options_of(run: Run, options: Mapping[str, object]) -> tuple[Options, Options]:
    """Those of ``initial_memory`` and those of ``reader`` among ``options``; None is left out.

    Raises:
        MemspanError: the run's architecture has no such option.
    """
    given = {name: value for name, value in options.items() if value is not None}
    parts = []
    for kind in (run.config.model.memory_options, run.config.model.reader_options):
        names = [field.name for field in dataclasses.fields(kind) if field.name in given]
        # The dataclass checks the values.
        kind(**(part := {name: given.pop(name) for name in names}))
        parts.append(part)
    if given:
        raise MemspanError(
            f"{', '.join(sorted(given))} is no option of a {run.config.architecture}: leave it out"
        )
    return parts[0], parts[1]
