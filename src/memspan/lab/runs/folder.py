"""A run's folder: found by a path or a name, and locked while it is trained.

The trained runs that come with memspan are found by name, and never written to.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from memspan.errors import MemspanError
from memspan.files.disk import only_writer, path_of, read_limited, unreadable
from memspan.lab.invocation import command

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run's folder."""
BEST = "best"
"""The file there that names the best one."""
SHIPPED = {
    folder.name: Path(str(folder))
    for folder in sorted(resources.files("memspan.lab").joinpath("trained").iterdir(), key=str)
    if folder.is_dir()
}
"""The runs that come with memspan: name -> folder."""


@dataclass(frozen=True)
class Place:
    """The run or checkpoint that a path names."""

    run: Path
    """The run's folder."""
    checkpoint: Path | None
    """The checkpoint's folder; None: the run itself, whose weights are the best so far."""


def folder_name(step: int) -> str:
    """The name of the folder with the checkpoint of ``step``."""
    return f"step-{step:08d}"


def place_of(path: str | Path) -> Place:
    """The run or checkpoint at a path, or the shipped run of that name.

    ``RUN/checkpoints/step-00000750`` is a checkpoint, as are ``step-750`` and ``best`` in the same
    folder. Any other path is taken for a run, without looking.

    Raises:
        MemspanError: the run has no such checkpoint.
    """
    folder = run_folder(path)
    # As given, unless that is relative to somewhere inside the run's folder.
    whole = folder if folder.parent.name == CHECKPOINTS else Path(os.path.abspath(folder))
    if whole.parent.name != CHECKPOINTS or not (whole.parents[1] / "config.toml").is_file():
        return Place(folder, None)
    run = whole.parents[1]
    name = whole.name
    if name == BEST:
        with contextlib.suppress(OSError):
            name = read_limited(whole, 100).decode(errors="replace").strip()
    known = re.fullmatch(r"step-([0-9]{1,18})", name)
    found = whole.with_name(folder_name(int(known[1]))) if known else None
    if found is None or not found.is_dir():
        kept = sorted(p.name for p in whole.parent.glob("step-*") if p.is_dir())
        raise MemspanError(
            f"there is no checkpoint {path}: use one of {', '.join(kept) or 'none yet'}, or {run} "
            "for the best weights so far"
        )
    return Place(run, found)


def run_alone(path: str | Path, why: str) -> Path:
    """The folder of the run at a path; ``why``: the reason to refuse a checkpoint."""
    place = place_of(path)
    if place.checkpoint is not None:
        raise MemspanError(f"{path} is a checkpoint, and {why}: give the run's folder, {place.run}")
    return place.run


def run_folder(run: str | Path) -> Path:
    """The folder at a path, or else that of the shipped run of that name."""
    path = path_of(run)
    return path if path.is_dir() else SHIPPED.get(str(path), path)


def is_shipped(folder: Path) -> bool:
    """True for the folder of a shipped run."""
    return folder.is_dir() and any(folder.samefile(own) for own in SHIPPED.values())


def refuse_shipped(folder: Path) -> None:
    """Raise if a run would be written over a file or a shipped run."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise MemspanError(f"{folder} is not a folder: name a new one (--out)")
    if is_shipped(folder):
        own = command(
            "train", "--init-from", folder.name, "--preset", folder / "config.toml", "--data.corpus"
        )
        raise MemspanError(
            f"{folder.name} comes with memspan and is never changed: train a run of your own from its "
            f"weights with {own} TEXT"
        )


LIMIT = 1 << 28
"""Maximum size in bytes of a file in ``BOUND``."""
BOUND = ("config.toml", "tokenizer.json")
"""Files whose checksums are in every checkpoint."""


MISSING = "missing"
"""Stands for the checksum of a missing file."""
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""Errors that mean that a folder has gone."""


def checksum(path: Path) -> str:
    """SHA-256 of a file in :data:`BOUND`, or :data:`MISSING`.

    Raises:
        UnreadableError: it exists but could not be read.
    """
    # Loads OpenSSL, which help and other verbs do not need.
    import hashlib

    try:
        return hashlib.sha256(read_limited(path, LIMIT)).hexdigest()
    except FileNotFoundError:
        return MISSING
    except OSError as error:
        raise unreadable(path, error) from None


class RunLock:
    """A run's folder, locked by this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checksums: dict[str, str] = {}
        """SHA-256 of the files in :data:`BOUND` when the run was created or resumed, by name."""
        self._identity = os.stat(folder)

    def load(self) -> None:
        """Take the checksums of the files in :data:`BOUND`.

        Raises:
            MemspanError: one is missing or could not be read, so no checkpoint could be bound to it.
        """
        checksums = {name: checksum(self.folder / name) for name in BOUND}
        for name, check in checksums.items():
            if check == MISSING:
                raise MemspanError(f"{self.folder / name} is missing: restore it")
        self.checksums = checksums

    def refuse_moved(self) -> None:
        """Raise :class:`MemspanError` if the folder was moved, deleted or replaced."""
        try:
            if os.path.samestat(os.stat(self.folder), self._identity):
                for name in BOUND if self.checksums else ():
                    # When a folder is deleted, its files go first.
                    os.stat(self.folder / name)
                return
        except OSError as error:
            if error.errno not in GONE:
                # It may be temporary. If not, the next write fails.
                return
        raise MemspanError(
            f"the run's folder {self.folder} was moved, deleted or replaced while it was trained, "
            "and nothing was written there again: continue from its last checkpoint with --resume and "
            "its new path"
        )


@contextlib.contextmanager
def lock_run(folder: Path) -> Iterator[RunLock]:
    """Lock a run's folder for this trainer.

    Raises:
        MemspanError: another process is training in it, it comes with memspan, or it cannot be written.
    """
    refuse_shipped(folder)
    if (folder / "checkpoints").is_symlink():
        raise MemspanError(
            f"{folder / 'checkpoints'} is a link out of the run's folder, where old checkpoints "
            "would be deleted: put the folder itself there"
        )
    with only_writer(folder):
        yield RunLock(folder)
