"""The precision that a run trains in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from memspan.precision.products import Precision, automatic, resolve
from memspan.training.options import TrainConfig


def precision_of(options: TrainConfig, device: torch.device) -> Precision:
    """The precision of a run with these options on ``device``.

    Raises:
        MemspanError: as :func:`resolve`.
    """
    return resolve(options.precision, options.matmul_precision, automatic(device), device)


def without_auto(options: TrainConfig, precision: str, matmul_precision: str) -> TrainConfig:
    """The options with ``auto`` replaced by what the run uses, so that it resumes the same anywhere."""
    used: dict[str, Any] = {"precision": precision, "matmul_precision": matmul_precision}
    left_open = {name: used[name] for name in used if getattr(options, name) == "auto"}
    return replace(options, **left_open)
