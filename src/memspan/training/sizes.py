"""A lower bound of the memory that training takes."""

from __future__ import annotations

import torch

from memspan.models.options import BackboneConfig
from memspan.models.sizes import (
    BYTES,
    REMEDY,
    parameters,
    refuse_oversized,
    refuse_oversized_model,
)
from memspan.runs.options import RunConfig


def refuse_oversized_training(
    config: RunConfig[BackboneConfig], vocab_size: int, rows: int, device: torch.device
) -> None:
    """Raise :class:`MemspanError` if training on ``rows`` rows does not fit the device.

    Counted are the weights, their gradients and two moments, and each layer's two inputs, saved for
    backward.
    """
    refuse_oversized_model(config.model, vocab_size, config.embedding)
    weights = BYTES * parameters(config.model, vocab_size, config.embedding)
    if config.train.parallel == "ddp":
        refuse_oversized("training's weights, gradients and moments", 4 * weights, device, REMEDY)
    tokens = rows * config.train.segment_length * config.train.gradient_segments
    refuse_oversized(
        "training's activations",
        BYTES * 2 * tokens * config.model.n_layers * config.model.d_model,
        device,
        "lower batch_size or segment_length",
    )
