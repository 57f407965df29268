"""A run: begun in a new folder, and loaded as a trained model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from memspan.data.identity import Identity, recorded
from memspan.data.tokenizers.base import Tokenizer
from memspan.data.tokenizers.registry import load_tokenizer
from memspan.errors import MemspanError
from memspan.files.tensors import load_tensors
from memspan.invocation import command
from memspan.models import LanguageModel
from memspan.models.options import BackboneConfig
from memspan.runs import checkpoints, history
from memspan.runs.binding import refuse_changes
from memspan.runs.config_files import load_config, to_toml
from memspan.runs.options import RunConfig
from memspan.runs.places import Place, place_of
from memspan.runs.run_lock import RunLock
from memspan.runs.shipped import run_folder
from memspan.runs.weights import WEIGHTS, check_fit, load_weights, widened


@dataclass(frozen=True)
class Run:
    """A trained model and everything that is needed to use it."""

    folder: Path
    """As it was named: the run's, or that of one of its checkpoints."""
    config: RunConfig[BackboneConfig]
    tokenizer: Tokenizer
    model: LanguageModel
    """With the best weights so far, or the checkpoint's, in evaluation mode."""
    step: int
    """Updates that made these weights."""
    corpus: Identity
    """What it was trained and validated on; empty if saved by an older version, or converted."""


def create(lock: RunLock, config: RunConfig[BackboneConfig], tokenizer: Tokenizer) -> None:
    """Begin a run in the locked folder, anew where one ended before its first checkpoint.

    Raises:
        MemspanError: the folder holds a run already, or cannot be written.
    """
    folder = lock.folder
    if (folder / WEIGHTS).exists() or checkpoints.steps_of(folder):
        raise MemspanError(
            f"{folder} holds a run already: choose another --out, or continue it with "
            f"--resume {folder}"
        )
    checkpoints.remove_leftovers(folder)
    (folder / history.NAME).unlink(missing_ok=True)
    lock.write("config.toml", to_toml(config).encode())
    tokenizer.save(folder)
    lock.load()


def trained(folder: str | Path) -> tuple[Place, RunConfig[BackboneConfig]]:
    """Where a run or checkpoint is that has weights, and its options; the weights are not read.

    Raises:
        MemspanError: not a run, or one without weights yet.
    """
    config, place = load_config(Path(folder)), place_of(folder)
    if place.checkpoint is None and not (place.run / WEIGHTS).exists():
        raise _without_weights(place.run)
    return place, config


def load(folder: str | Path, device: str = "cpu") -> Run:
    """The best weights of a run so far, or those of one of its checkpoints, ready to evaluate.

    Args:
        folder: the run's, or a checkpoint's in it, such as ``runs/book/checkpoints/step-750``. Where
            there is none, the name of a run that comes with memspan, such as ``shakespeare``.
        device: where the model goes, such as ``cuda``.

    Raises:
        MemspanError: not a run, one without weights yet, or a file in it is missing or damaged.

    Example::

        run = memspan.load("runs/book")
        output = run.model(tokens)
    """
    place, config = trained(folder)
    tokenizer = load_tokenizer(place.run)
    if place.checkpoint is None:
        stored, header = load_tensors(place.run / WEIGHTS)
    else:
        stored, header = checkpoints.weights_at(place.checkpoint)
    weights, named = widened(stored), run_folder(folder)
    refuse_changes(place.run, header)
    check_fit(named, config, tokenizer.vocab_size, weights)
    model = LanguageModel(tokenizer.vocab_size, config.model, config.embedding)
    load_weights(model, weights, named)
    try:
        step = int(header["step"])
    except (KeyError, ValueError):
        raise MemspanError(f"{named / WEIGHTS} does not say its step: restore it") from None
    try:
        corpus = recorded(json.loads(header.get("corpus", "{}")))
    except (ValueError, RecursionError) as error:
        raise MemspanError(f"{named / WEIGHTS} is damaged ({error}): restore it") from None
    return Run(named, config, tokenizer, model.to(device).eval(), step, corpus)


def _without_weights(folder: Path) -> MemspanError:
    if checkpoints.steps_of(folder):
        # Resuming publishes the best checkpoint's weights again.
        return MemspanError(
            f"{folder / WEIGHTS} is missing: restore it, or have it made again from the checkpoints "
            f"with {command('export', folder)}"
        )
    return checkpoints.no_checkpoint(folder)
