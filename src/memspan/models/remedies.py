"""Remedies for errors of torch's own that come of the way a model was made or is called."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memspan.errors import MemspanError
from memspan.models.sizes import refuse_too_long
from memspan.ops.first_derivatives import TRANSFORMS, is_transformed, without
from memspan.trees import named


def refuse_with_remedy(
    error: RuntimeError, module: nn.Module, x: Tensor, implementation: str | None = None
) -> None:
    """Raise :class:`MemspanError` if ``error``, which ``module`` raised in reading ``x [B, T, ...]``,
    comes of the way it was made or is called. Nothing is looked at before there is an error."""
    refuse_too_long(error, x)
    if isinstance(error, torch.OutOfMemoryError):
        return
    remedy = _remedy(error, dict(module.named_parameters()), implementation)
    if remedy is not None:
        raise MemspanError(remedy) from error


def _remedy(
    error: RuntimeError, parameters: dict[str, nn.Parameter], implementation: str | None
) -> str | None:
    if implementation != "reference" and is_transformed(*parameters.values()):
        return without(TRANSFORMS)
    if torch.is_grad_enabled() and any(p.is_inference() for p in parameters.values()):
        return (
            "this model was made in torch.inference_mode(), whose tensors have no gradients: make it "
            "outside, or train copy.deepcopy(model), copied outside"
        )
    if "DTensor" in str(error):
        return (
            "some parameters are DTensors, whose parts nobody gathered: call the module that "
            "fully_shard was called with last, not one inside it, with plain tensors"
        )
    types = {named(p.dtype): name for name, p in parameters.items() if p.is_floating_point()}
    if len(types) > 1 and "dtype" in str(error):
        listed = ", ".join(f"{name} is {kind}" for kind, name in types.items())
        return (
            f"parameters are of several types ({listed}): convert all by model.to, or read under "
            "torch.autocast"
        )
    return None
