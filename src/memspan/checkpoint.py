"""A run's folder: what is in it, written so that a crash at any moment loses at most what came since
the last checkpoint.

    config.toml  tokenizer.json  metrics.jsonl  loss.png
    model.safetensors                       the best weights so far: what evaluate and generate use
    checkpoints/step-00000500/              the last two, and the best
        model.safetensors                   weights
        training.safetensors                optimiser, carried memory, random states
        state.json                          step, position in the text, scores, checksums
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from memspan.config import RunConfig
from memspan.config_files import read_config, to_toml
from memspan.data.tokenizers import Tokenizer, load_tokenizer
from memspan.errors import MemspanError
from memspan.files import sync_folder, write_atomically
from memspan.models import LanguageModel
from memspan.tensor_files import load_tensors, save_tensors

KEEP = 2
"""Checkpoints kept beside the best."""


@dataclass(frozen=True)
class Run:
    """A trained model with all that is needed to use it."""

    folder: Path
    config: RunConfig[Any]
    tokenizer: Tokenizer
    model: LanguageModel
    step: int


@dataclass(frozen=True)
class Checkpoint:
    """What training continues from. ``training``: tensors by name; ``state``: plain JSON values."""

    weights: dict[str, Tensor]
    training: dict[str, Tensor]
    state: dict[str, Any]


def create(folder: Path, config: RunConfig[Any], tokenizer: Tokenizer) -> None:
    """Make a new run's folder.

    Raises:
        MemspanError: there is a run already, or the folder cannot be written.
    """
    if (folder / "config.toml").exists():
        raise MemspanError(
            f"{folder} holds a run already: choose another --out, or continue it with "
            f"--resume {folder}"
        )
    write_atomically(folder / "config.toml", to_toml(config).encode())
    tokenizer.save(folder)


def save(folder: Path, checkpoint: Checkpoint, best: bool) -> None:
    """Add a checkpoint, then drop those no longer needed. The folder appears whole or not at all.

    ``best``: these weights are the best so far.
    """
    step = checkpoint.state["step"]
    target = _step_folder(folder, step)
    building = target.with_name(f".{target.name}.tmp")
    try:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        header = {"step": str(step)}
        save_tensors(building / "model.safetensors", checkpoint.weights, header)
        save_tensors(building / "training.safetensors", checkpoint.training, header)
        state = checkpoint.state | {"files": _checksums(folder)}
        content = json.dumps(state, indent=1, sort_keys=True)
        check = hashlib.sha256(content.encode()).hexdigest()
        write_atomically(building / "state.json", f"{content}\n{check}\n".encode())
        if target.exists():
            shutil.rmtree(target)
        os.replace(building, target)
        sync_folder(target.parent)
        if best:
            _publish(target / "model.safetensors", folder / "model.safetensors")
    except OSError as error:
        shutil.rmtree(building, ignore_errors=True)
        raise MemspanError(
            f"cannot save a checkpoint in {folder} ({error.strerror}): free some space, then go on "
            f"with --resume {folder}; the last checkpoint is untouched"
        ) from None
    except MemspanError:
        shutil.rmtree(building, ignore_errors=True)
        raise
    keep = {*_steps(folder)[-KEEP:], checkpoint.state.get("best_step")}
    for old in _steps(folder):
        if old not in keep:
            shutil.rmtree(_step_folder(folder, old), ignore_errors=True)


def latest(folder: Path) -> Checkpoint:
    """The newest checkpoint of a run.

    Raises:
        MemspanError: there is none, or one of its files is missing or damaged.
    """
    steps = _steps(folder)
    if not steps:
        raise MemspanError(f"{folder} has no checkpoint yet: start a new run")
    source = _step_folder(folder, steps[-1])
    try:
        state = _read_state(source / "state.json")
        if state["files"] != _checksums(folder):
            raise MemspanError(
                f"config.toml or tokenizer.json in {folder} has changed since the run was saved: "
                "restore it, or start a new run with the changed options"
            )
        weights, _ = load_tensors(source / "model.safetensors")
        training, _ = load_tensors(source / "training.safetensors")
    except MemspanError as error:
        others = f"; or move {source} away to go on from step {steps[-2]}" if steps[1:] else ""
        raise MemspanError(f"{error}{others}") from None
    return Checkpoint(weights, training, state)


def load(folder: str | Path, device: str = "cpu") -> Run:
    """The model and tokeniser of a run, ready to evaluate: the best weights so far.

    Raises:
        MemspanError: not a run, or a file in it is missing or damaged.
    """
    folder = Path(folder)
    config = load_config(folder)
    tokenizer = load_tokenizer(folder)
    weights, header = load_tensors(folder / "model.safetensors")
    model = LanguageModel(tokenizer.vocab_size, config.model, config.embedding)
    load_weights(model, weights, folder)
    return Run(folder, config, tokenizer, model.to(device).eval(), int(header.get("step", 0)))


def load_config(folder: Path) -> RunConfig[Any]:
    if not folder.is_dir():
        raise MemspanError(f"no run at {folder}: check the path, or train one with memspan train")
    if not (folder / "config.toml").is_file():
        raise MemspanError(f"{folder} is no run, it has no config.toml: check the path")
    return read_config(folder / "config.toml")


def load_weights(model: LanguageModel, weights: dict[str, Tensor], folder: Path) -> None:
    try:
        model.load_state_dict(expand_ties(model, weights))
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise MemspanError(
            f"the weights in {folder} do not fit its config.toml ({reason}): restore both"
        ) from None


def weights_of(model: LanguageModel) -> dict[str, Tensor]:
    """The state by name, every tied tensor once."""
    seen: set[int] = set()
    weights = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            weights[name] = tensor.detach()
            seen.add(id(tensor))
    return weights


def expand_ties(model: LanguageModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of :func:`weights_of`: tied tensors under all their names."""
    first: dict[int, str] = {}
    expanded = dict(weights)
    for name, tensor in model.state_dict(keep_vars=True).items():
        source = first.setdefault(id(tensor), name)
        if name not in expanded and source in weights:
            expanded[name] = weights[source]
    return expanded


def _publish(source: Path, target: Path) -> None:
    """Put the same file under a second name, without a second copy where the disk allows it."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
    try:
        os.replace(temporary, target)
    finally:
        # Renaming one name of a file over another of its names does nothing, by POSIX.
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    sync_folder(target.parent)


def _read_state(path: Path) -> dict[str, Any]:
    try:
        content, check = path.read_text(encoding="utf-8").rstrip("\n").rsplit("\n", 1)
        if hashlib.sha256(content.encode()).hexdigest() != check:
            raise ValueError("its checksum is wrong")
        state: dict[str, Any] = json.loads(content)
    except FileNotFoundError:
        raise MemspanError(f"{path} is missing: restore it") from None
    except (OSError, ValueError) as error:
        raise MemspanError(f"{path} is damaged ({error}): restore it") from None
    return state


def _checksums(folder: Path) -> dict[str, str]:
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in ("config.toml", "tokenizer.json")
        if (folder / name).is_file()
    }


def _step_folder(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def _steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    found = (folder / "checkpoints").glob("step-*")
    return sorted(int(p.name[5:]) for p in found if p.is_dir() and p.name[5:].isdigit())
