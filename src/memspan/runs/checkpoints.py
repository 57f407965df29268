"""A run's folder: what is in it, written so that a crash at any moment loses at most what came since
the last checkpoint.

    config.toml  tokenizer.json  metrics.jsonl  loss.png
    model.safetensors                       the best weights so far: what evaluate and generate use
    checkpoints/step-00000500/              the last two, and the best
        model.safetensors                   weights
        training.safetensors                optimiser, carried memory, random states
        state.json                          step, position in the text, scores, checksums

Where several processes train together, a checkpoint has a folder ``shards`` instead of the two files
of tensors, until :func:`export`, and ``checkpoints/latest`` names the newest.

Every file is bound to the others by checksums: those of ``config.toml`` and ``tokenizer.json``, as they
were loaded, stand in the header of every ``model.safetensors`` and in every ``state.json``, which has
those of the checkpoint's tensors, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from memspan.data.identity import recorded
from memspan.data.tokenizers import Tokenizer
from memspan.errors import MemspanError
from memspan.files.bytes import read_limited, sync_folder, write_atomically
from memspan.files.tensors import SEAL, load_tensors, save_tensors
from memspan.runs.claim import BOUND, Claim
from memspan.runs.config_files import to_toml
from memspan.runs.options import RunConfig
from memspan.runs.run import WEIGHTS, refuse_changes

SHARDS = "shards"
"""A checkpoint's folder of tensors that several processes wrote, each a part."""
LATEST = "latest"
"""The file that names the newest checkpoint of several processes."""
KEEP = 2
"""Checkpoints kept beside the best."""
TENSORS = (WEIGHTS, "training.safetensors")
"""A checkpoint's weights and all other tensors."""
STATE = {
    "step": (int,),
    "best": (float, type(None)),
    "best_step": (int, type(None)),
    "streams": (dict,),
    "corpus": (dict, str),
    "files": (dict,),
    "metrics": (dict,),
    "health": (dict,),
}
"""What a ``state.json`` has at least, with the types that each may be."""
T = TypeVar("T")
Target = Callable[[str, torch.Size, torch.dtype], Tensor]
"""Name, shape and type of a tensor on disk to the tensor it is read into: a part of it, or all."""
STATE_LIMIT = 1 << 20
"""Bytes of a ``state.json`` at most."""


@dataclass(frozen=True)
class Checkpoint:
    """What training continues from. ``training``: tensors by name; ``state``: plain JSON values."""

    weights: dict[str, Tensor]
    training: dict[str, Tensor]
    state: dict[str, Any]


def create(claim: Claim, config: RunConfig[Any], tokenizer: Tokenizer) -> None:
    """Make a new run in the claimed folder. One that ended before its first checkpoint is begun anew.

    Raises:
        MemspanError: there is a run already, or the folder cannot be written.
    """
    folder = claim.folder
    if (folder / WEIGHTS).exists() or steps_of(folder):
        raise MemspanError(
            f"{folder} holds a run already: choose another --out, or continue it with "
            f"--resume {folder}"
        )
    _remove_leftovers(folder)
    (folder / "history.jsonl").unlink(missing_ok=True)
    claim.write("config.toml", to_toml(config).encode())
    tokenizer.save(folder)
    claim.load()


def save(claim: Claim, checkpoint: Checkpoint, best: bool) -> None:
    """Add a checkpoint, then drop those no longer needed. The folder appears whole or not at all.

    ``best``: these weights are the best so far. The same step of a run is the same checkpoint: one
    that is there is not written again.
    """
    folder = claim.folder
    step = checkpoint.state["step"]
    target = _step_folder(folder, step)
    building = _building(folder, step)
    try:
        if not target.exists():
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir(parents=True)
            files = claim.checksums()
            header = _header(checkpoint.state, files)
            for name in TENSORS:
                tensors = checkpoint.weights if name == WEIGHTS else checkpoint.training
                files[name] = save_tensors(building / name, tensors, header)
            _write_state(building, checkpoint.state, files)
            _still_here(claim)
            # Without it, the newest folder is the newest checkpoint.
            (target.parent / LATEST).unlink(missing_ok=True)
            os.replace(building, target)
            sync_folder(target.parent)
        if best:
            _publish(target / WEIGHTS, folder / WEIGHTS)
    except (OSError, MemspanError) as error:
        shutil.rmtree(building, ignore_errors=True)
        raise _failed_save(claim, error) from None
    _drop_old(folder, checkpoint.state["best_step"])


def new_shards(folder: Path, step: int) -> Path | None:
    """An empty folder for the shards of a new checkpoint; None: this step's is there already."""
    if _step_folder(folder, step).exists():
        return None
    shards = _building(folder, step) / SHARDS
    try:
        shutil.rmtree(shards.parent, ignore_errors=True)
        shards.mkdir(parents=True)
    except OSError as error:
        raise unsaved(folder, error) from None
    return shards


def _still_here(claim: Claim) -> None:
    """Refuse to finish a save during which the folder was moved: parts of it may lie elsewhere."""
    if claim.moved():
        found = claim.whereabouts()
        where = "and its new path" if found is None else shlex.quote(str(found))
        raise MemspanError(
            f"the run's folder {claim.folder} was moved or replaced during a save: the checkpoints in "
            f"it are untouched; go on with --resume {where}"
        )


def _failed_save(claim: Claim, error: OSError | MemspanError) -> MemspanError:
    """What to say: that the folder is gone explains all that failed in it."""
    try:
        _still_here(claim)
    except MemspanError as gone:
        return gone
    return error if isinstance(error, MemspanError) else unsaved(claim.folder, error)


def commit_shards(claim: Claim, state: dict[str, Any], best: bool) -> None:
    """Make a checkpoint of the shards that all processes have written, as :func:`save` does."""
    from memspan.runs.shards import checksums

    folder = claim.folder
    step = state["step"]
    building, target = _building(folder, step), _step_folder(folder, step)
    try:
        sums = checksums(building / SHARDS)
        files = claim.checksums() | {f"{SHARDS}/{n}": c for n, c in sums.items()}
        _write_state(building, state, files)
        _still_here(claim)
        # First: a name that is not there is passed over, but a whole checkpoint must not be.
        write_atomically(target.parent / LATEST, f"{target.name}\n".encode())
        os.replace(building, target)
        sync_folder(target.parent)
        if best:
            _publish_shards(folder, step)
    except (OSError, MemspanError) as error:
        drop_shards(folder, step)
        raise _failed_save(claim, error) from None
    _drop_old(folder, state["best_step"])


def drop_shards(folder: Path, step: int) -> None:
    """Make room: the shards of a checkpoint that could not be finished."""
    shutil.rmtree(_building(folder, step), ignore_errors=True)


def unsaved(folder: Path, error: BaseException) -> MemspanError:
    """What to say when a checkpoint could not be written."""
    reason = getattr(error, "strerror", None) or str(error)
    return MemspanError(
        f"cannot save a checkpoint in {folder} ({reason}): free some space, then go on with "
        f"--resume {folder}; the last checkpoint is untouched"
    )


def export(folder: Path) -> list[int]:
    """Turn the checkpoints of several processes into those of one, and publish the best weights.

    The folder must be claimed.

    Returns:
        The steps whose checkpoints were turned.

    Raises:
        MemspanError: there is no checkpoint, or a damaged one.
    """
    recover(folder, latest_state(folder))
    turned = []
    for step in steps_of(folder):
        source = _step_folder(folder, step)
        state = _read_state(source / "state.json")
        if WEIGHTS in state["files"]:
            continue
        whole = _read_shards(source, state)
        files = _bound(state)
        header = _header(state, files)
        for name in TENSORS:
            tensors = whole.weights if name == WEIGHTS else whole.training
            files[name] = save_tensors(source / name, tensors, header)
        # From here on they count, and the shards do not.
        _write_state(source, state, files)
        turned.append(step)
    (folder / "checkpoints" / LATEST).unlink(missing_ok=True)
    for step in steps_of(folder):
        shutil.rmtree(_step_folder(folder, step) / SHARDS, ignore_errors=True)
    return turned


def latest_state(folder: Path) -> dict[str, Any]:
    """The ``state`` of the newest checkpoint, as :func:`latest`."""
    return _latest(folder, lambda source, state: state)


def latest(folder: Path, target: Target | None = None, verify: bool = True) -> Checkpoint:
    """The newest checkpoint of a run.

    Args:
        target: what shards are read into (None: whole tensors).
        verify: check the sums of shards; others may be doing that.

    Raises:
        MemspanError: there is none, or one of its files is missing or damaged.
    """

    def read(source: Path, state: dict[str, Any]) -> Checkpoint:
        if WEIGHTS not in state["files"]:
            return _read_shards(source, state, target, verify)
        found = {}
        for name in TENSORS:
            found[name], header = load_tensors(source / name)
            if header[SEAL] != state["files"].get(name) or header.get("step") != str(state["step"]):
                raise MemspanError(f"{source / name} is another checkpoint's: restore its own")
        return Checkpoint(found[WEIGHTS], found[TENSORS[1]], state)

    return _latest(folder, read)


def _latest(folder: Path, read: Callable[[Path, dict[str, Any]], T]) -> T:
    steps = steps_of(folder)
    if not steps:
        preset, out = shlex.quote(str(folder / "config.toml")), shlex.quote(str(folder))
        raise MemspanError(
            f"{folder} has no checkpoint yet: start it again with memspan train --preset {preset} "
            f"--out {out}"
        )
    source = _newest(folder)
    try:
        state = _read_state(source / "state.json")
        found = read(source, state)
    except MemspanError as error:
        older = [step for step in steps if _step_folder(folder, step) != source]
        others = f"; or move {source} away to go on from step {older[-1]}" if older else ""
        raise MemspanError(f"{error}{others}") from None
    # No other checkpoint would help here.
    refuse_changes(folder, state["files"])
    return found


def recover(folder: Path, state: dict[str, Any]) -> None:
    """Finish what a crash after the checkpoint of ``state`` left undone, and remove half-written files.

    Raises:
        MemspanError: the best weights are damaged in both their places.
    """
    _remove_leftovers(folder)
    best = state["best_step"]
    _drop_old(folder, best)
    step = state["step"] if best is None else best
    source, published = _step_folder(folder, step) / WEIGHTS, folder / WEIGHTS
    with contextlib.suppress(MemspanError):
        header = load_tensors(published)[1]
        refuse_changes(folder, header)
        if header.get("step") == str(step):
            return
    if not source.parent.exists():
        # Moved away, as the message below says: the newest weights stand in for the best.
        source = _step_folder(folder, state["step"]) / WEIGHTS
    try:
        if not source.exists() and (source.parent / SHARDS).is_dir():
            _publish_shards(folder, int(source.parent.name.removeprefix("step-")))
        else:
            load_tensors(source)
            _publish(source, published)
    except MemspanError as error:
        raise MemspanError(
            f"{error}; or move {source.parent} away to go on without the best weights so far"
        ) from None
    except OSError as error:
        raise MemspanError(
            f"cannot write {published} ({error.strerror}): free some space, then --resume"
        ) from None


def _drop_old(folder: Path, best_step: int | None) -> None:
    """All checkpoints but the last and the best, and what is left of those dropped earlier."""
    steps = steps_of(folder)
    for old in steps[:-KEEP]:
        if old != best_step:
            # Under another name first: half a checkpoint is never taken for a whole one.
            doomed = _step_folder(folder, old).with_name(f".step-{old:08d}.old.tmp")
            with contextlib.suppress(OSError):
                os.replace(_step_folder(folder, old), doomed)
    for doomed in (folder / "checkpoints").glob(".step-*.old.tmp"):
        shutil.rmtree(doomed, ignore_errors=True)


def _newest(folder: Path) -> Path:
    """The checkpoint that ``latest`` names, where it names one, else that of the last step."""
    with contextlib.suppress(OSError):
        name = read_limited(folder / "checkpoints" / LATEST, 100).decode(errors="replace").strip()
        for step in steps_of(folder):
            if _step_folder(folder, step).name == name:
                return _step_folder(folder, step)
    return _step_folder(folder, steps_of(folder)[-1])


def _read_shards(
    source: Path, state: dict[str, Any], target: Target | None = None, verify: bool = True
) -> Checkpoint:
    from memspan.runs.shards import checksums, load_shards

    start = f"{SHARDS}/"
    wanted = {n.removeprefix(start): c for n, c in state["files"].items() if n.startswith(start)}
    if not wanted or not (source / SHARDS).is_dir():
        raise MemspanError(f"{source / SHARDS} is missing: restore it")
    if verify:
        found = checksums(source / SHARDS)
        for name in sorted({*wanted, *found}):
            if wanted.get(name) != found.get(name):
                how = "damaged" if name in found else "missing"
                raise MemspanError(f"{source / SHARDS / name} is {how}: restore it")
    tensors = load_shards(source / SHARDS, target or _whole)
    prefix = "model/"
    weights = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    training = {n: t for n, t in tensors.items() if not n.startswith(prefix)}
    return Checkpoint(weights, training, state)


def _whole(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _publish_shards(folder: Path, step: int) -> None:
    source = _step_folder(folder, step)
    state = _read_state(source / "state.json")
    weights = _read_shards(source, state).weights
    save_tensors(folder / WEIGHTS, weights, _header(state, _bound(state)))


def _header(state: dict[str, Any], files: dict[str, str]) -> dict[str, str]:
    """What the files of tensors say of the run, to be read without its checkpoints."""
    return {
        "step": str(state["step"]),
        "corpus": json.dumps(state["corpus"], sort_keys=True),
        **files,
    }


def _bound(state: dict[str, Any]) -> dict[str, str]:
    """The checksums that bind a checkpoint to the files it was trained with."""
    return {name: state["files"][name] for name in BOUND}


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


def _write_state(folder: Path, state: dict[str, Any], files: dict[str, str]) -> None:
    content = json.dumps(state | {"files": files}, indent=1, sort_keys=True)
    check = hashlib.sha256(content.encode()).hexdigest()
    write_atomically(folder / "state.json", f"{content}\n{check}\n".encode())


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
        recorded(state["corpus"])
    except FileNotFoundError:
        raise MemspanError(f"{path} is missing: restore it") from None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise MemspanError(f"{path} is damaged ({error}): restore it") from None
    return state


def _remove_leftovers(folder: Path) -> None:
    """Files and folders whose writing or deletion a crash cut short."""
    for left in (*folder.glob(".*.tmp"), *(folder / "checkpoints").glob(".*.tmp")):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                left.unlink()


def _step_folder(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def _building(folder: Path, step: int) -> Path:
    """Where a step's folder is made."""
    return folder / "checkpoints" / f".step-{step:08d}.tmp"


def steps_of(folder: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    found = (folder / "checkpoints").glob("step-*")
    steps = (int(p.name[5:]) for p in found if p.is_dir() and p.name[5:].isdecimal())
    return sorted(step for step in steps if _step_folder(folder, step).is_dir())
