"""What a training run begins with: the options before its flags, its folder, its text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from memspan.commands.parsing import peek_flags
from memspan.commands.standard_input import keep_input
from memspan.data.options import SPLITS
from memspan.distributed import reports
from memspan.errors import MemspanError
from memspan.models.options import BackboneConfig
from memspan.models.registry import MODELS
from memspan.runs.config_files import load_config, preset_file, read_config
from memspan.runs.options import DEFAULT_ARCHITECTURE, RunConfig
from memspan.training.options import BUDGETS


def begin_with(arguments: list[str]) -> RunConfig[BackboneConfig]:
    """The options that flags change: those of the run to resume, of the preset, or the defaults."""
    given = peek_flags(arguments)
    if given.model is not None and given.model not in MODELS:
        raise MemspanError(f"there is no --model {given.model}: use one of {', '.join(MODELS)}")
    if given.resume is not None:
        config = load_config(Path(given.resume))
        if given.model not in (None, config.architecture):
            raise MemspanError(
                f"{given.resume} is a {config.architecture}: drop --model {given.model}, or start a "
                "new run"
            )
        return config
    if given.preset is not None:
        return read_config(preset_file(given.preset), given.model)
    architecture = given.model or DEFAULT_ARCHITECTURE
    return RunConfig(MODELS[architecture](), architecture)


def with_one_budget(arguments: list[str]) -> list[str]:
    """``arguments``, without the budget of a preset or of the run to resume if they give another."""
    given = _flags(arguments)
    flags = [f"--train.{name.replace('_', '-')}" for name in BUDGETS]
    others = [flag for flag in flags if flag not in given]
    if len(others) == len(flags):
        return arguments
    return [*arguments, *_none(others)]


def with_one_text(arguments: list[str]) -> list[str]:
    """The same for the corpus if they give a text for each split, and the reverse."""
    given = _flags(arguments)
    own = [f"--data.{split}" for split in SPLITS]
    if "--data.train" in given and "--data.corpus" not in given:
        return [*arguments, *_none(["--data.corpus"])]
    if "--data.corpus" in given and not given.intersection(own):
        return [*arguments, *_none(own)]
    return arguments


def with_one_patience(arguments: list[str]) -> list[str]:
    """The same for the threshold of early stopping if they turn that off."""
    threshold = "--train.early-stopping-threshold"
    off = re.search(r"--train\.early.stopping.patience[= ]None\b", " ".join(arguments))
    return [*arguments, threshold, "0"] if off and threshold not in _flags(arguments) else arguments


def _flags(arguments: list[str]) -> set[str]:
    return {argument.partition("=")[0].replace("_", "-") for argument in arguments}


def _none(flags: list[str]) -> Iterator[str]:
    return (word for flag in flags for word in (flag, "None"))


def new_folder(config: RunConfig[BackboneConfig]) -> Path:
    """An unused folder in ``runs/``, named after the architecture and the text."""
    # The last part of the path that has letters in it: for a glob, often the folder.
    text = config.data.train or config.data.corpus or ""
    parts = [Path(part).stem for part in reversed(Path(text).parts)]
    names = [re.sub(r"[^\w-]+", "-", part).strip("-")[:60] for part in parts]
    corpus = next(filter(None, names), "text")
    number = 1
    while (folder := Path("runs") / f"{config.architecture}-{corpus}-{number}").exists():
        number += 1
    return folder


def keep_text(config: RunConfig[BackboneConfig], out: Path | None, resume: Path | None) -> Path:
    """Write the text of standard input beside the run's folder, so that the run can be resumed.

    Raises:
        MemspanError: there is no text, or this is not a new run in a single process.
    """
    if resume is not None or reports.is_worker():
        raise MemspanError(
            "a text from standard input is for a new run without torchrun: give --data.corpus a file"
        )
    folder = out or new_folder(config)
    kept = folder.with_name(folder.name + ".txt")
    taken = MemspanError(
        f"{kept}, where the text of standard input would be kept, exists: remove it, give another "
        f"--out, or train on it with --data.corpus {kept}"
    )
    if kept.exists():
        raise taken
    try:
        keep_input(kept, "--data.corpus")
    except FileExistsError:
        # Another run has put its text there in the meantime.
        raise taken from None
    print(f"standard input is kept in {kept}", flush=True)
    return kept
