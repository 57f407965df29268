"""A run's folder ``checkpoints``: saves, finds and deletes them, so that a crash costs few steps.

    checkpoints/step-00000500/   a checkpoint: ``state.json`` and its tensors, in one of two formats
    checkpoints/best             the name of the best one, after the first validation

The newest ones and the best one are kept. A checkpoint is written under a temporary name and then
renamed, so it is complete or absent. The weights of the best one are published: they become the run's
own ``model.safetensors``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from memspan.errors import MemspanError, UnreadableError
from memspan.files.disk import link_atomically, remedy, sync_folder, unreadable, write_atomically
from memspan.files.tensors import SEAL, checked_header, read_header, save_tensors
from memspan.lab.invocation import command
from memspan.lab.runs import shards
from memspan.lab.runs.checkpoint_files import (
    TRAINING,
    WEIGHTS,
    Checkpoint,
    State,
    bound_files,
    header,
    read_file,
    read_state,
    refuse_changes,
    write_state,
    write_tensors,
)
from memspan.lab.runs.folder import BEST, CHECKPOINTS, RunLock, folder_name
from memspan.lab.runs.shards import SHARDS, Target


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on disk whose state has been read and checked; its tensors have not."""

    folder: Path
    state: State

    def load(self, target: Target | None = None, verify: bool = True) -> Checkpoint:
        """Read its tensors; otherwise as :func:`memspan.lab.runs.shards.read`."""
        with _suggesting_older(self.folder):
            if WEIGHTS in self.state["files"]:
                names = (WEIGHTS, TRAINING)
                weights, training = (read_file(self.folder, n, self.state)[0] for n in names)
                return Checkpoint(weights, training, self.state)
            return shards.read(self.folder, self.state, target, verify)


def latest(folder: Path) -> SavedCheckpoint:
    """The newest checkpoint of the run in ``folder``, from which it continues."""
    steps = steps_of(folder)
    if not steps:
        raise no_checkpoint(folder)
    found = _step_folder(folder, steps[-1])
    with _suggesting_older(found):
        state = read_state(found)
    # No other checkpoint would help here.
    refuse_changes(folder, state["files"])
    return SavedCheckpoint(found, state)


def steps_of(folder: Path) -> list[int]:
    """Steps of the complete checkpoints of the run in ``folder``, ascending.

    Raises:
        UnreadableError: they could not be listed, which does not mean that there are none.
    """
    try:
        with os.scandir(folder / CHECKPOINTS) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable(folder / CHECKPOINTS, error) from None
    steps = [int(name[5:]) for name in names if re.fullmatch("step-[0-9]{1,18}", name)]
    return sorted(step for step in steps if folder_name(step) in names)


def no_checkpoint(folder: Path) -> MemspanError:
    """The error for a run that ended, or is still training, before its first checkpoint."""
    again = command("train", "--preset", folder / "config.toml", "--out", folder)
    return MemspanError(
        f"{folder} has no checkpoint yet: if it is not training now, start it again with {again}"
    )


@contextlib.contextmanager
def _suggesting_older(source: Path) -> Iterator[None]:
    """Add to an error about the checkpoint in ``source`` which older one to continue from."""
    try:
        yield
    except UnreadableError:
        # It may well be good.
        raise
    except MemspanError as error:
        folder = source.parents[1]
        older = [step for step in steps_of(folder) if _step_folder(folder, step) != source]
        hint = f"; or move {source} away to continue from step {older[-1]}" if older else ""
        raise MemspanError(f"{error}{hint}") from None


def weights_at(source: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The weights of the checkpoint in ``source`` alone, and the header of their file."""
    state = read_state(source)
    if WEIGHTS in state["files"]:
        return read_file(source, WEIGHTS, state)
    return dict(shards.opened(source, state).weights), header(state, bound_files(state))


# --- saving -------------------------------------------------------------------------------------------


def save(lock: RunLock, checkpoint: Checkpoint, best: bool, keep: int) -> None:
    """Add a checkpoint written by this process alone, then delete those no longer needed.

    A step that has been saved is not written again: the same step of a run is the same checkpoint.
    ``best``: publish its weights; ``keep``: number of newest checkpoints that stay (0: all).
    """

    def write(building: Path) -> dict[str, str]:
        _make(building)
        return write_tensors(building, checkpoint, lock.checksums)

    _add(lock, checkpoint.state, best, keep, write)


def commit_shards(lock: RunLock, state: State, best: bool, keep: int) -> None:
    """Complete a checkpoint whose shards all processes have written; otherwise as :func:`save`."""
    _add(lock, state, best, keep, lambda new: lock.checksums | shards.checksums(new / SHARDS))


def _add(
    lock: RunLock, state: State, best: bool, keep: int, write: Callable[[Path], dict[str, str]]
) -> None:
    """Add a checkpoint: ``write`` fills its folder, and returns the checksums of its files."""
    folder = lock.folder
    building = _building(lock.folder, state["step"])
    target = _step_folder(folder, state["step"])
    try:
        if not target.exists():
            write_state(building, state, write(building))
            lock.refuse_moved()
            os.replace(building, target)
            sync_folder(target.parent)
        if best:
            _publish(target, folder / WEIGHTS)
        lock.refuse_moved()
        _settle(folder, state["best_step"], keep)
    except Exception as error:
        shutil.rmtree(building, ignore_errors=True)
        # If the folder is gone, that explains whatever failed in it.
        lock.refuse_moved()
        raise failed_save(folder, error) from None


def _make(building: Path) -> None:
    """Make the folder of a new checkpoint, but not that of the run, which may have been deleted."""
    shutil.rmtree(building, ignore_errors=True)
    building.parent.mkdir(exist_ok=True)
    building.mkdir()


def new_shards(folder: Path, step: int) -> Path | None:
    """An empty folder for the shards of a new checkpoint; None if that step has been saved."""
    if _step_folder(folder, step).exists():
        return None
    building = _building(folder, step)
    try:
        _make(building)
        (building / SHARDS).mkdir()
    except OSError as error:
        raise failed_save(folder, error) from None
    return building / SHARDS


def drop_shards(folder: Path, step: int) -> None:
    """Delete the shards of a checkpoint that could not be completed, to free their space."""
    shutil.rmtree(_building(folder, step), ignore_errors=True)


def failed_save(folder: Path, error: BaseException) -> MemspanError:
    """The error for a checkpoint that could not be written; it names the one to continue from."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    first = f"{remedy(error)}, then " if isinstance(error, OSError) else ""
    try:
        steps = steps_of(folder)
    except UnreadableError:
        steps = []
    if steps:
        step = f"the checkpoint of step {steps[-1]} is untouched"
        kept = f"{first}continue with --resume {folder}; {step}"
    else:
        kept = f"{first}start again, since there was no checkpoint yet"
    return MemspanError(f"cannot save a checkpoint in {folder} ({reason}): {kept}")


def _publish(source: Path, published: Path) -> None:
    """Make the weights of the checkpoint in ``source`` the run's own."""
    if (source / WEIGHTS).exists() or not (source / SHARDS).is_dir():
        link_atomically(source / WEIGHTS, published)
    else:
        state = read_state(source)
        weights = shards.opened(source, state).weights
        save_tensors(published, weights, header(state, bound_files(state)), make_folder=False)


# --- repair and conversion ----------------------------------------------------------------------------


def recover(folder: Path, state: State, keep: int) -> None:
    """Complete whatever a crash after the latest checkpoint interrupted, and delete leftovers.

    ``state``: the latest checkpoint's.

    Raises:
        MemspanError: the best weights are damaged in both their places; the disk is full.
    """
    remove_leftovers(folder)
    best = state["best_step"]
    _settle(folder, best, keep)
    step = state["step"] if best is None else best
    source = _step_folder(folder, step)
    published = folder / WEIGHTS
    with contextlib.suppress(MemspanError):
        about = checked_header(published)
        refuse_changes(folder, about)
        if about.get("step") == str(step):
            return
    if not source.exists():
        # Moved away, as the message below suggests: the latest weights replace the best.
        source = _step_folder(folder, state["step"])
    try:
        if (source / WEIGHTS).exists() or not (source / SHARDS).is_dir():
            # Refuses damaged ones.
            checked_header(source / WEIGHTS)
        _publish(source, published)
    except OSError as error:
        raise failed_save(folder, error) from None
    except MemspanError as error:
        raise MemspanError(
            f"{error}; or move {source} away to continue without the best weights so far"
        ) from None


def export(folder: Path, keep: int) -> list[int]:
    """Merge the checkpoints of several processes, and publish the best weights.

    Returns:
        The steps whose checkpoints were converted.
    """
    recover(folder, latest(folder).state, keep)
    converted = []
    for step in steps_of(folder):
        source = _step_folder(folder, step)
        state = read_state(source)
        if WEIGHTS in state["files"]:
            continue
        files = write_tensors(source, shards.opened(source, state), bound_files(state))
        # Once this is written, the new files count and the shards do not.
        write_state(source, state, files)
        converted.append(step)
    for step in steps_of(folder):
        shutil.rmtree(_step_folder(folder, step) / SHARDS, ignore_errors=True)
    return converted


def remove_leftovers(folder: Path) -> None:
    """Delete files and folders left by a crash while they were written or deleted."""
    # Ours, and safetensors' own beside a file of ours.
    patterns = (".*.tmp", ".tmp*")
    folders = (folder, folder / CHECKPOINTS)
    _delete(path for each in folders for pattern in patterns for path in each.glob(pattern))


def _settle(folder: Path, best_step: int | None, keep: int) -> None:
    """Record the best checkpoint; delete all others except the newest, and leftovers of deletions."""
    steps = steps_of(folder)
    named = folder / CHECKPOINTS / BEST
    if best_step in steps:
        write_atomically(named, f"{folder_name(best_step)}\n".encode(), make_folder=False)
    else:
        named.unlink(missing_ok=True)
    outdated = steps[:-keep] if keep else []
    if outdated:
        try:
            _refuse_unusable(folder, steps[-1])
        except MemspanError as error:
            # Older checkpoints may be the only usable ones.
            logging.getLogger("memspan").warning(f"old checkpoints are kept: {error}")
            return
    for old in outdated:
        if old != best_step:
            # Renamed first: half a checkpoint must not look like a complete one.
            doomed = _step_folder(folder, old).with_name(f".step-{old:08d}.old.tmp")
            with contextlib.suppress(OSError):
                os.replace(_step_folder(folder, old), doomed)
    _delete((folder / CHECKPOINTS).glob(".step-*.old.tmp"))


def _refuse_unusable(folder: Path, step: int) -> None:
    """Raise if the run could not continue from a checkpoint; only the headers of tensors are read."""
    source = _step_folder(folder, step)
    state = read_state(source)
    refuse_changes(folder, state["files"])
    for name in (WEIGHTS, TRAINING) if WEIGHTS in state["files"] else ():
        if read_header(source / name).get(SEAL) != state["files"].get(name):
            raise MemspanError(f"{source / name} cannot be read, or is another checkpoint's")


def _delete(leftovers: Iterable[Path]) -> None:
    """Delete files and folders; failures are ignored, and tried again at every save."""
    with contextlib.suppress(OSError):
        for left in leftovers:
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink()


def _step_folder(folder: Path, step: int) -> Path:
    return folder / CHECKPOINTS / folder_name(step)


def _building(folder: Path, step: int) -> Path:
    """The folder of a checkpoint while it is written."""
    return folder / CHECKPOINTS / f".step-{step:08d}.tmp"
