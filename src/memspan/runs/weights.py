"""A model's weights by name, as ``model.safetensors`` holds them: every tied tensor once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from memspan.errors import MemspanError
from memspan.models import LanguageModel
from memspan.models.options import BackboneConfig
from memspan.runs.options import RunConfig

WEIGHTS = "model.safetensors"
"""The run's best weights so far, and likewise each checkpoint's own."""


def weights_of(model: LanguageModel) -> dict[str, Tensor]:
    """A model's parameters and buffers by name, every tied tensor once."""
    seen: set[int] = set()
    weights = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            weights[name] = tensor.detach()
            seen.add(id(tensor))
    return weights


def widened(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights that are stored in half precision, as those of shipped runs, in float32."""
    return {
        name: tensor.float() if tensor.dtype == torch.float16 else tensor
        for name, tensor in weights.items()
    }


def check_fit(
    folder: Path, config: RunConfig[BackboneConfig], vocab_size: int, weights: Mapping[str, Tensor]
) -> None:
    """Refuse weights of another model, before a model of these options takes memory or time.

    Args:
        folder: the run's, for the message.
        config: its options.
        vocab_size: its tokeniser's.
        weights: what its weights' file or checkpoint holds.
    """
    if config.model.n_layers > len(weights):
        raise _misfit(folder, f"{len(weights)} tensors for {config.model.n_layers:,} layers")
    try:
        with torch.device("meta"):
            model = LanguageModel(vocab_size, config.model, config.embedding)
    except (RuntimeError, TypeError, MemspanError) as error:
        # Sizes beyond what can be computed with.
        raise _misfit(folder, error) from None
    wanted, given = _forms(weights_of(model)), _forms(weights)
    if differ := sorted(dict(wanted.items() ^ given.items())):
        name = differ[0]
        reason = f"{name} is {given.get(name, 'missing')}, not {wanted.get(name, 'there')}"
        raise _misfit(folder, reason)


def load_weights(model: LanguageModel, weights: dict[str, Tensor], folder: Path) -> None:
    """Copy ``weights`` of the run in ``folder`` into ``model``."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise _misfit(folder, error) from None


def _misfit(folder: Path, reason: object) -> MemspanError:
    reason = " ".join(str(reason).split())[:200]
    return MemspanError(
        f"the weights in {folder} do not fit its config.toml ({reason}): restore both"
    )


def _forms(weights: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in weights.items()}
