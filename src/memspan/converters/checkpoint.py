"""What a reader of someone's checkpoints returns, before it becomes a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from memspan.converters.names import Names
from memspan.data.tokenizers.base import Tokenizer
from memspan.models import LanguageModel
from memspan.models.options import BackboneConfig
from memspan.runs.options import RunConfig


@dataclass(frozen=True)
class Checkpoint:
    """A model of someone's, described as a run of ours."""

    config: RunConfig[BackboneConfig]
    tokenizer: Tokenizer
    tensors: dict[str, Tensor]
    """By their peer's names."""
    names: Callable[[LanguageModel], Names]
    """Those names, in terms of a model with these options."""
    where: Path
    """The file with the tensors, for messages."""
    notices: tuple[str, ...] = ()
    """Lines for the user: what is not as it was."""


class Read(Protocol):
    """The function ``read`` in the module of each kind."""

    def __call__(self, folder: Path) -> Checkpoint:
        """The checkpoint in a folder.

        Raises:
            MemspanError: a file is missing, damaged, or of a model that memspan does not have.
        """
        ...
