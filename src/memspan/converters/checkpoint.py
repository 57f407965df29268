"""What a reader of someone's checkpoints returns, before it becomes a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from memspan.converters.names import Names
from memspan.data.tokenizers.base import Tokenizer
from memspan.models import LanguageModel
from memspan.models.options import BackboneConfig
from memspan.runs.options import RunConfig


@dataclass(frozen=True)
class Checkpoint:
    """Someone else's model, described as a run of ours."""

    config: RunConfig[BackboneConfig]
    tokenizer: Tokenizer
    tensors: dict[str, Tensor]
    """By their peer's names."""
    names: Callable[[LanguageModel], Names]
    """Those names, in terms of a model with these options."""
    where: Path
    """The file with the tensors, for messages."""
    notices: tuple[str, ...] = ()
    """Lines for the user: what differs from the original."""


Read = Callable[[Path], Checkpoint]
"""The function ``read`` in the module of each kind: the checkpoint in a folder. It raises
:class:`MemspanError` where a file is missing, damaged, or of a model that memspan does not have."""
