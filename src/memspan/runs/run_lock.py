"""A run's folder while it is trained: locked, followed when it is moved, its options protected."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from memspan.errors import MemspanError
from memspan.files.bytes import read_limited, write_atomically
from memspan.files.lock import only_writer
from memspan.runs.shipped import refuse_shipped

BOUND = ("config.toml", "tokenizer.json")
"""Files whose checksums are in every checkpoint."""
LOADED = (*BOUND, "history.jsonl")
"""Files that a run continues from, besides its checkpoints."""
LIMIT = 1 << 28
"""Maximum size of such a file in bytes."""


class RunLock:
    """A run's folder, locked by this process.

    Another one under the same name is not mistaken for it. An open handle, where the system has such,
    keeps its number on the disk from being given to another, and tells where it is.
    """

    def __init__(self, folder: Path, handle: int | None) -> None:
        self.folder = folder
        """Its last known path."""
        self.loaded: dict[str, bytes] = {}
        """Content of the files in :data:`LOADED` when the run was created or resumed."""
        self._handle = handle
        self._identity = os.stat(folder if handle is None else handle)

    def load(self) -> None:
        """Read the files in :data:`LOADED`."""
        for name in LOADED:
            with contextlib.suppress(OSError):
                self.loaded[name] = read_limited(self.folder / name, LIMIT)

    def write(self, name: str, content: bytes) -> None:
        """Change one of these files.

        Raises:
            MemspanError: it cannot be written.
        """
        write_atomically(self.folder / name, content)
        self.loaded[name] = content

    def checksums(self) -> dict[str, str]:
        """SHA-256 of the files in :data:`BOUND` as they were loaded, by name."""
        return {name: hashlib.sha256(self.loaded[name]).hexdigest() for name in BOUND}

    def moved(self) -> bool:
        """Whether the folder is no longer at its last known path."""
        return not self._is_ours(self.folder)

    def _is_ours(self, folder: Path) -> bool:
        try:
            return os.path.samestat(os.stat(folder), self._identity)
        except OSError:
            return False

    def follow(self) -> None:
        """Update the path of a folder that was moved.

        Raises:
            MemspanError: it was deleted, or the system cannot tell (only Linux can).
        """
        found = self.whereabouts()
        if found is None:
            raise MemspanError(
                f"the run's folder {self.folder} was deleted, moved or replaced while it was "
                "trained: nothing was written to what is there now; if the folder still exists, "
                "continue from its last checkpoint with --resume"
            )
        self.folder = found

    def whereabouts(self) -> Path | None:
        """Where the folder is now; None: deleted, or the system cannot tell (only Linux can)."""
        try:
            found = Path(os.readlink(f"/proc/self/fd/{self._handle}"))
        except OSError:
            return None
        return found if self._is_ours(found) else None

    def restore(self) -> list[str]:
        """Write files again that were changed or deleted since they were loaded.

        Returns:
            A line for the user about each.

        Raises:
            MemspanError: one of them cannot be written.
        """
        lines = []
        for name, content in self.loaded.items():
            path = self.folder / name
            try:
                if read_limited(path, LIMIT) == content:
                    continue
                exists = True
            except FileNotFoundError:
                exists = False
            except OSError:
                exists = True
            if not exists:
                write_atomically(path, content)
                lines.append(f"{path} was deleted while training: it is written again")
                continue
            aside = path.with_name(f"{name}.changed")
            try:
                os.replace(path, aside)
            except OSError as error:
                raise MemspanError(
                    f"{path} was changed while training and cannot be written again "
                    f"({error.strerror}): move it away, then --resume"
                ) from None
            try:
                write_atomically(path, content)
            except MemspanError:
                os.replace(aside, path)
                raise
            lines.append(
                f"{path} was changed while training, which does not change the run: it is written "
                f"again, and what was there is now {aside.name}"
            )
        return lines


@contextlib.contextmanager
def lock_run(folder: Path) -> Iterator[RunLock]:
    """Lock a run's folder for this trainer.

    Raises:
        MemspanError: another process is training in it, it came with memspan, or it cannot be written.
    """
    refuse_shipped(folder)
    if (folder / "checkpoints").is_symlink():
        raise MemspanError(
            f"{folder / 'checkpoints'} is a link out of the run's folder, where old checkpoints "
            "would be deleted: put the folder itself there"
        )
    with only_writer(folder) as handle:
        yield RunLock(folder, handle)
