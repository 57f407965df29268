"""Models whose laws can be checked: objects of several kinds, and models by name. Needs statelaws."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import statelaws
from memspan.calls import nearest, nearest_path
from memspan.errors import MemspanError
from memspan.files.disk import path_of
from memspan.lab.carries_memory import CarriesMemory
from memspan.lab.installed import require
from memspan.lab.runs.folder import SHIPPED, run_folder
from memspan.lab.runs.options import PRESETS, read_config
from memspan.lab.runs.run import Run, is_run, load
from memspan.models import Backbone, LanguageModel
from statelaws import targets
from statelaws.adapters.recipes import VOCABULARY
from statelaws.targets import TYPE


@contextlib.contextmanager
def errors_as_ours() -> Iterator[None]:
    """Turn errors of statelaws into :class:`MemspanError`."""
    try:
        yield
    except statelaws.StatelawsError as error:
        raise MemspanError(str(error)) from error


def as_stateful(model: object, made: str | None = None) -> statelaws.Stateful[Any]:
    """The model in the form in which laws are checked; ``made``: Python that makes it, as ``found``,
    for scripts."""
    if isinstance(model, Run):
        model = model.model
    if isinstance(model, LanguageModel | Backbone):
        return CarriesMemory(model)
    with errors_as_ours():
        return targets.as_stateful(model, made)


def move(model: statelaws.Stateful[Any], device: torch.device) -> None:
    """Move a model to ``device``.

    Raises:
        MemspanError: it cannot be moved: its weights have no values, or there is no room.
    """
    with errors_as_ours():
        targets.move(model, device)


def named(
    target: str, trust_remote_code: bool = False, seed: int = 0, vocab_size: int = VOCABULARY
) -> statelaws.Stateful[Any]:
    """Find the model of a name: see ``memspan check --help``. ``vocab_size``: of a model type of
    transformers."""
    folder = run_folder(target)
    with torch.random.fork_rng(), errors_as_ours():
        torch.manual_seed(seed)
        if target.startswith(TYPE):
            require("transformers")
            return targets.recipe(target.removeprefix(TYPE), seed, vocab_size)
        if is_run(target):
            return as_stateful(load(folder))
        if (folder / "config.json").is_file():
            require("transformers")
            return targets.pretrained(folder, trust_remote_code, _known_to_transformers(folder))
        if target in PRESETS or target.endswith(".toml"):
            return as_stateful(_preset(PRESETS.get(target, path_of(target))))
        if targets.is_object(target):
            return as_stateful(*targets.found(target, seed))
    if folder.is_dir():
        raise MemspanError(
            f"{target} is neither a run, with a config.toml, nor a model of transformers, with a "
            "config.json: check the path"
        )
    if folder.is_file():
        raise MemspanError(
            f"{target} is a file, neither a run nor a model: check the path (memspan measure takes "
            "texts by --corpus)"
        )
    if near := nearest(target, [*SHIPPED, *PRESETS]) or nearest_path(target):
        raise MemspanError(f"there is no {target}: perhaps {near} is meant")
    raise MemspanError(
        f"there is no {target}: give a run ({', '.join(SHIPPED)}, or a folder), a preset, a folder "
        f"in transformers' format, {TYPE}TYPE, FILE.py:NAME or MODULE:NAME"
    )


def _preset(file: Path) -> LanguageModel:
    config = read_config(file)
    # Enough for any tokens of bytes, and for the clusters of an adaptive embedding.
    vocab_size = max(256, *(start + 1 for start in (0, *config.embedding.cutoffs)))
    model = config.model.for_segments(config.train.segment_length)
    return LanguageModel(vocab_size, model, config.embedding).eval()


def _known_to_transformers(folder: Path) -> str:
    """Let transformers know an exported run, and return the line that does so."""
    name = "memspan.lab.integrations.transformers"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if json.loads((folder / "config.json").read_bytes()).get("model_type") == "memspan":
            importlib.import_module(name)
            return f"import {name}\n"
    return ""
