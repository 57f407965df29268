"""A run: created in a new folder, loaded as a trained model, and read with."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from memspan.calls import checked, nearest
from memspan.checks import MatmulPrecision, Products
from memspan.devices import device_for
from memspan.errors import MemspanError
from memspan.files.disk import path_of, write_atomically
from memspan.files.tensors import load_tensors
from memspan.lab.data.token_files import Identity, recorded
from memspan.lab.data.tokenizers.base import Tokenizer
from memspan.lab.data.tokenizers.registry import load_tokenizer
from memspan.lab.invocation import command
from memspan.lab.modes import usual_modes
from memspan.lab.runs import checkpoints, history
from memspan.lab.runs.checkpoint_files import (
    WEIGHTS,
    check_fit,
    load_weights,
    refuse_changes,
    widened,
)
from memspan.lab.runs.folder import Place, RunLock, place_of, run_folder
from memspan.lab.runs.options import RunConfig, load_config, to_toml
from memspan.memory import Memory
from memspan.models import LanguageModel
from memspan.models.options import BackboneConfig
from memspan.precision import Precision, resolve


@dataclass(frozen=True)
class Run:
    """A trained model and everything that is needed to use it."""

    folder: Path
    """The folder as given: the run's, or that of one of its checkpoints."""
    config: RunConfig[BackboneConfig]
    tokenizer: Tokenizer
    model: LanguageModel
    """The model with the best weights so far, or the checkpoint's, in evaluation mode."""
    step: int
    """Updates that made these weights."""
    corpus: Identity
    """Identity of its training and validation texts; empty for converted runs."""


def create(lock: RunLock, config: RunConfig[BackboneConfig], tokenizer: Tokenizer) -> None:
    """Begin a run in the locked folder, also in place of one that ended before its first checkpoint."""
    folder = lock.folder
    # Listed: a file whose status cannot be read may exist all the same.
    if WEIGHTS in os.listdir(folder) or checkpoints.steps_of(folder):
        raise MemspanError(
            f"{folder} holds a run already: choose another --out, or continue it with "
            f"--resume {folder}"
        )
    checkpoints.remove_leftovers(folder)
    (folder / history.NAME).unlink(missing_ok=True)
    write_atomically(folder / "config.toml", to_toml(config).encode())
    tokenizer.save(folder)
    lock.load()


def trained(folder: str | Path) -> tuple[Place, RunConfig[BackboneConfig]]:
    """The place of a trained run or checkpoint, and its options; the weights are not read.

    Raises:
        MemspanError: not a run, or one without weights yet.
    """
    config = load_config(path_of(folder))
    place = place_of(folder)
    if place.checkpoint is None and not (place.run / WEIGHTS).exists():
        if not checkpoints.steps_of(place.run):
            raise checkpoints.no_checkpoint(place.run)
        # Resuming publishes the best checkpoint's weights again.
        raise MemspanError(
            f"{place.run / WEIGHTS} is missing: restore it, or recreate it from the checkpoints with "
            f"{command('export', place.run)}"
        )
    return place, config


@checked
@usual_modes()
def load(folder: str | Path, device: str = "cpu") -> Run:
    """Load a run's best weights so far, or those of one of its checkpoints, in evaluation mode.

    Args:
        folder: the run's folder, or a checkpoint in it, such as ``runs/book/checkpoints/step-750``; or
            the name of a run that comes with memspan, such as ``shakespeare``.
        device: the device to load the model on, such as ``cuda``; ``auto``: CUDA, if there is one.

    Raises:
        MemspanError: not a run; a run without weights yet; a file in it is missing or damaged; there is
            no such device.

    Example::

        run = memspan.load("runs/book")
        output = run.model(tokens)
    """
    place, config = trained(folder)
    target = device_for(str(device))
    tokenizer = load_tokenizer(place.run)
    if place.checkpoint is None:
        stored, header = load_tensors(place.run / WEIGHTS)
    else:
        stored, header = checkpoints.weights_at(place.checkpoint)
    weights = widened(stored)
    named = run_folder(folder)
    refuse_changes(place.run, header)
    check_fit(named, config, tokenizer.vocab_size, weights)
    # The weights drawn here are overwritten, and leave the caller's random numbers unchanged.
    with torch.random.fork_rng(devices=[]):
        model = LanguageModel(tokenizer.vocab_size, config.model, config.embedding)
    load_weights(model, weights, named)
    try:
        step = int(header["step"])
        corpus = recorded(json.loads(header.get("corpus", "{}")))
    except (LookupError, ValueError, RecursionError) as error:
        raise MemspanError(f"{named / WEIGHTS} is damaged ({error}): restore it") from None
    return Run(named, config, tokenizer, model.to(target).eval(), step, corpus)


def is_run(model: object) -> TypeGuard[Run | str | Path]:
    """True if ``model`` is a run, or the name of one."""
    if isinstance(model, str | Path):
        return (place_of(model).run / "config.toml").is_file()
    return isinstance(model, Run)


def opened(run: Run | str | Path) -> Run:
    """The run itself, or the one in that folder, on CUDA if available."""
    return run if isinstance(run, Run) else load(run, str(device_for("auto")))


def precision_for(
    run: Run, products: Products = "auto", matmul: MatmulPrecision = "auto"
) -> Precision:
    """The precision to read in: ``auto`` is float32, multiplied as in training.

    Cautions are logged as warnings of the logger ``memspan``.
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
    """Tokens to read at once: as in training, or fewer if positions do not reach that far.

    ``memory``: the one to continue from (None: an empty one of ``sizes``); ``reading``: options of the
    reader.
    """
    own = run.config.train.segment_length
    memory = run.model.initial_memory(1, **sizes) if memory is None else memory
    backbone: Any = run.model.backbone
    longest: int | None = backbone.longest_segment(memory, **reading)
    # If not even one token fits, the reader says what does.
    return own if longest is None else max(min(own, longest), 1)


def options_of(
    run: Run, options: Mapping[str, object], others: Iterable[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split ``options`` into those of ``initial_memory`` and those of ``reader``, without any that are
    None. ``others``: further names to suggest for an unknown one."""
    given = {name: value for name, value in options.items() if value is not None}
    parts = []
    known = list(others)
    for kind in (run.config.model.memory_options, run.config.model.reader_options):
        names = [field.name for field in dataclasses.fields(kind) if field.name in given]
        known += [field.name for field in dataclasses.fields(kind)]
        # The dataclass checks the values.
        kind(**(part := {name: given.pop(name) for name in names}))
        parts.append(part)
    if given:
        name = min(given)
        near = nearest(name, known)
        raise MemspanError(
            f"{name} is not an option of {run.config.architecture}: "
            + (f"perhaps {near} is meant" if near else "leave it out")
        )
    return parts[0], parts[1]
