"""Convert other programs' checkpoints into runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from memspan.calls import checked
from memspan.errors import MemspanError
from memspan.files.disk import path_of
from memspan.lab.converters import names
from memspan.lab.converters.kinds import KindName, kind_of
from memspan.lab.converters.names import Names
from memspan.lab.data.tokenizers.base import Tokenizer
from memspan.lab.runs import saving
from memspan.lab.runs.checkpoint_files import weights_of
from memspan.lab.runs.options import RunConfig
from memspan.models import LanguageModel
from memspan.models.options import BackboneConfig


@dataclass(frozen=True)
class Checkpoint:
    """Someone else's model, described as a run of ours."""

    config: RunConfig[BackboneConfig]
    tokenizer: Tokenizer
    tensors: dict[str, Tensor]
    """Tensors by the peer's names."""
    names: Callable[[LanguageModel], Names]
    """Maps those names to the parameters of a model with these options."""
    where: Path
    """The file with the tensors, for messages."""
    notices: tuple[str, ...] = ()
    """Lines for the user: what differs from the original."""


@checked
def convert(source: str | Path, out: str | Path, *, kind: KindName | None = None) -> Path:
    """Make a run from someone else's checkpoint, as ``memspan convert`` does.

    The run evaluates, generates, measures and trains on like any other, and reads (memory, span, clamp)
    as its own options say. Nothing in the files is executed. What the user should know besides the
    result is logged as a warning of the logger ``memspan``.

    Args:
        source: the checkpoint's folder.
        out: a new folder for the run.
        kind: of checkpoint, such as ``transformers`` (None: found by the folder's files).

    Returns:
        The run's folder, for :func:`memspan.load`.

    Raises:
        MemspanError: a file is missing, damaged, or holds more than data; the checkpoint is of a model
            that memspan does not have; there is something at ``out`` already.

    Example::

        folder = memspan.convert("transfo-xl-wt103", "runs/wt103")
        print(memspan.generate(folder, "The river", tokens=50).text)
    """
    source = path_of(source)
    out = path_of(out)
    reader = import_module(f"memspan.lab.converters.{kind_of(source, kind).module}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise MemspanError(f"{out} exists already: choose another folder for the run")
    try:
        found: Checkpoint = reader.read(source)
    except MemspanError as error:
        # Options that no model has say nothing of the file that they are from.
        where = "" if str(source) in str(error) else f"{source}: "
        raise MemspanError(f"{where}{error}") from None
    model = _model(found)
    for line in found.notices:
        logging.getLogger("memspan").warning(line)
    return saving.write(out, found.config, found.tokenizer, weights_of(model))


def _model(found: Checkpoint) -> LanguageModel:
    """The checkpoint's model, once its tensors are known to fit."""
    config = found.config
    vocab_size = found.tokenizer.vocab_size
    where = str(found.where)
    # Making layers takes time, even on the meta device; each has at least eight tensors.
    if 8 * config.model.n_layers > len(found.tensors):
        raise MemspanError(
            f"{where} has {len(found.tensors)} tensors, too few for {config.model.n_layers:,} layers: "
            "check that its options are this model's"
        )
    # Shapes alone first: sizes that no tensor has must not take memory.
    try:
        with torch.device("meta"):
            shapes = LanguageModel(vocab_size, config.model, config.embedding)
    except (RuntimeError, TypeError, OverflowError) as error:
        reason = (str(error).splitlines() or [""])[0][:100]
        raise MemspanError(
            f"{where}: these options give sizes that no tensor can have ({reason}): check that they "
            "are this model's"
        ) from None
    names.check(shapes, found.names(shapes), found.tensors, where)
    model = LanguageModel(vocab_size, config.model, config.embedding)
    names.fill(model, found.names(model), found.tensors, where)
    return model
