"""A run's folder: what is in it, written so that a crash at any moment loses at most what came since
the last checkpoint.

    config.toml  tokenizer.json  metrics.jsonl  loss.png
    model.safetensors                       the best weights so far: what evaluate and generate use
    checkpoints/step-00000500/              the last two, and the best
        model.safetensors                   weights
        training.safetensors                optimiser, carried memory, random states
        state.json                          step, position in the text, scores, checksums

Every file is bound to the others by checksums: those of ``config.toml`` and ``tokenizer.json`` stand in
the header of every ``model.safetensors``, those of a checkpoint's tensors in its ``state.json``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memspan.config import RunConfig
from memspan.config_files import read_config, to_toml
from memspan.data.tokenizers import Tokenizer, load_tokenizer
from memspan.errors import MemspanError
from memspan.files import only_writer, read_limited, sync_folder, write_atomically
from memspan.models import LanguageModel
from memspan.tensor_files import SEAL, load_tensors, save_tensors

KEEP = 2
"""Checkpoints kept beside the best."""
TENSORS = ("model.safetensors", "training.safetensors")
"""A checkpoint's weights and all other tensors."""
STATE = {
    "step": (int,),
    "best": (float, type(None)),
    "best_step": (int, type(None)),
    "streams": (dict,),
    "corpus": (str,),
    "files": (dict,),
    "metrics": (dict,),
    "health": (dict,),
}
"""What a ``state.json`` has at least, with the types that each may be."""
STATE_LIMIT = 1 << 20
"""Bytes of a ``state.json`` at most."""


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


@contextlib.contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Hold the folder for this trainer alone.

    Raises:
        MemspanError: another process is training in it, or it cannot be written.
    """
    if (folder / "checkpoints").is_symlink():
        raise MemspanError(
            f"{folder / 'checkpoints'} is a link out of the run's folder, where old checkpoints "
            "would be deleted: put the folder itself there"
        )
    with only_writer(folder):
        yield


def create(folder: Path, config: RunConfig[Any], tokenizer: Tokenizer) -> None:
    """Make a new run's folder. A run that ended before its first checkpoint is begun anew.

    Raises:
        MemspanError: there is a run already, or the folder cannot be written.
    """
    if (folder / "model.safetensors").exists() or _steps(folder):
        raise MemspanError(
            f"{folder} holds a run already: choose another --out, or continue it with "
            f"--resume {folder}"
        )
    _remove_leftovers(folder)
    write_atomically(folder / "config.toml", to_toml(config).encode())
    tokenizer.save(folder)


def save(folder: Path, checkpoint: Checkpoint, best: bool) -> None:
    """Add a checkpoint, then drop those no longer needed. The folder appears whole or not at all.

    ``best``: these weights are the best so far. The same step of a run is the same checkpoint: one
    that is there is not written again.
    """
    step = checkpoint.state["step"]
    target = _step_folder(folder, step)
    building = target.with_name(f".{target.name}.tmp")
    try:
        if not target.exists():
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir(parents=True)
            files = _checksums(folder)
            header = {"step": str(step)} | files
            for name in TENSORS:
                tensors = checkpoint.weights if name == TENSORS[0] else checkpoint.training
                files[name] = save_tensors(building / name, tensors, header)
            content = json.dumps(checkpoint.state | {"files": files}, indent=1, sort_keys=True)
            check = hashlib.sha256(content.encode()).hexdigest()
            write_atomically(building / "state.json", f"{content}\n{check}\n".encode())
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
    _drop_old(folder, checkpoint.state["best_step"])


def latest(folder: Path) -> Checkpoint:
    """The newest checkpoint of a run.

    Raises:
        MemspanError: there is none, or one of its files is missing or damaged.
    """
    steps = _steps(folder)
    if not steps:
        raise MemspanError(
            f"{folder} has no checkpoint yet: start it again with --preset {folder}/config.toml "
            f"--out {folder}"
        )
    source = _step_folder(folder, steps[-1])
    try:
        state = _read_state(source / "state.json")
        found = {}
        for name in TENSORS:
            found[name], header = load_tensors(source / name)
            if header[SEAL] != state["files"].get(name) or header["step"] != str(state["step"]):
                raise MemspanError(f"{source / name} is another checkpoint's: restore its own")
    except MemspanError as error:
        others = f"; or move {source} away to go on from step {steps[-2]}" if steps[1:] else ""
        raise MemspanError(f"{error}{others}") from None
    # No other checkpoint would help here.
    _refuse_changes(folder, state["files"])
    return Checkpoint(found[TENSORS[0]], found[TENSORS[1]], state)


def recover(folder: Path, saved: Checkpoint) -> None:
    """Finish what a crash after ``saved`` was written left undone, and remove half-written files.

    Raises:
        MemspanError: the best weights are damaged in both their places.
    """
    _remove_leftovers(folder)
    best = saved.state["best_step"]
    _drop_old(folder, best)
    step = saved.state["step"] if best is None else best
    source, published = _step_folder(folder, step) / TENSORS[0], folder / TENSORS[0]
    with contextlib.suppress(MemspanError):
        header = load_tensors(published)[1]
        _refuse_changes(folder, header)
        if header["step"] == str(step):
            return
    load_tensors(source)
    try:
        _publish(source, published)
    except OSError as error:
        raise MemspanError(
            f"cannot write {published} ({error.strerror}): free some space, then --resume"
        ) from None


def load(folder: str | Path, device: str = "cpu") -> Run:
    """The model and tokeniser of a run, ready to evaluate: the best weights so far.

    Raises:
        MemspanError: not a run, or a file in it is missing or damaged.
    """
    folder = Path(folder)
    config = load_config(folder)
    tokenizer = load_tokenizer(folder)
    weights, header = load_tensors(folder / "model.safetensors")
    _refuse_changes(folder, header)
    check_fit(folder, config, tokenizer.vocab_size, weights)
    model = LanguageModel(tokenizer.vocab_size, config.model, config.embedding)
    load_weights(model, weights, folder)
    return Run(folder, config, tokenizer, model.to(device).eval(), int(header["step"]))


def load_config(folder: Path) -> RunConfig[Any]:
    if not folder.is_dir():
        raise MemspanError(f"no run at {folder}: check the path, or train one with memspan train")
    if not (folder / "config.toml").is_file():
        raise MemspanError(f"{folder} is no run, it has no config.toml: check the path")
    return read_config(folder / "config.toml")


def check_fit(
    folder: Path, config: RunConfig[Any], vocab_size: int, weights: dict[str, Tensor]
) -> None:
    """Refuse weights that are not those of such a model, before it takes any memory or time.

    Raises:
        MemspanError: names, shapes or types differ.
    """
    reason = ""
    if config.model.n_layers > len(weights):
        reason = f"{len(weights)} tensors are no {config.model.n_layers:,} layers"
    else:
        try:
            with torch.device("meta"):
                model = LanguageModel(vocab_size, config.model, config.embedding)
        except (RuntimeError, TypeError) as error:
            # A size beyond all arithmetic.
            reason = " ".join(str(error).split())[:200]
        else:
            wanted, given = _forms(weights_of(model)), _forms(weights)
            if differ := sorted(dict(wanted.items() ^ given.items())):
                name = differ[0]
                reason = f"{name} is {given.get(name, 'missing')}, not {wanted.get(name, 'there')}"
    if reason:
        raise MemspanError(
            f"the weights in {folder} do not fit its config.toml ({reason}): restore both"
        )


def _forms(weights: dict[str, Tensor]) -> dict[str, str]:
    return {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in weights.items()}


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


def _drop_old(folder: Path, best_step: int | None) -> None:
    """All checkpoints but the last and the best."""
    steps = _steps(folder)
    for old in steps[:-KEEP]:
        if old != best_step:
            # Under another name first: half a checkpoint is never taken for a whole one.
            doomed = _step_folder(folder, old).with_name(f".step-{old:08d}.old.tmp")
            with contextlib.suppress(OSError):
                os.replace(_step_folder(folder, old), doomed)
            shutil.rmtree(doomed, ignore_errors=True)


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
        text = read_limited(path, STATE_LIMIT).decode()
        content, check = text.removesuffix("\n").rsplit("\n", 1)
        if hashlib.sha256(content.encode()).hexdigest() != check:
            raise ValueError("its checksum is wrong")
        state: dict[str, Any] = json.loads(content)
        for name, kinds in STATE.items():
            if type(state[name]) not in kinds:
                raise ValueError(f"its {name} is {type(state[name]).__name__}")
        if min(state["step"], state["best_step"] or 0) < 0:
            raise ValueError("its step is negative")
    except FileNotFoundError:
        raise MemspanError(f"{path} is missing: restore it") from None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise MemspanError(f"{path} is damaged ({error}): restore it") from None
    return state


def _refuse_changes(folder: Path, files: dict[str, str]) -> None:
    """``files``: checksums of ``config.toml`` and ``tokenizer.json``, among others, as saved."""
    for name, check in _checksums(folder).items():
        if files.get(name) != check:
            raise MemspanError(
                f"{name} in {folder} has changed since the run was saved: restore it, or start a "
                "new run with the changed options"
            )


def _remove_leftovers(folder: Path) -> None:
    """Files and folders whose writing or deletion a crash cut short."""
    for left in (*folder.glob(".*.tmp"), *(folder / "checkpoints").glob(".*.tmp")):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                left.unlink()


def _checksums(folder: Path) -> dict[str, str]:
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        if (folder / name).is_file()
        else "missing"
        for name in ("config.toml", "tokenizer.json")
    }


def _step_folder(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def _steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    found = (folder / "checkpoints").glob("step-*")
    steps = (int(p.name[5:]) for p in found if p.is_dir() and p.name[5:].isdecimal())
    return sorted(step for step in steps if _step_folder(folder, step).is_dir())
