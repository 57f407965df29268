"""A run's folder while it is trained: the folder itself, whatever happens to its name, and the files
that say how the run was made, as they were loaded."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from memspan.errors import MemspanError
from memspan.files.bytes import read_limited, write_atomically
from memspan.files.lock import only_writer

BOUND = ("config.toml", "tokenizer.json")
"""The files whose checksums every checkpoint holds."""
LOADED = (*BOUND, "history.jsonl")
"""The files that a run is continued from besides its checkpoints."""
LIMIT = 1 << 28
"""Bytes of such a file at most."""


class Claim:
    """A run's folder that this process alone trains in."""

    def __init__(self, folder: Path, handle: int) -> None:
        self.folder = folder
        """Where the folder is, as far as known."""
        self.loaded: dict[str, bytes] = {}
        """What the files of :data:`LOADED` held when the run was created or resumed."""
        self._handle = handle

    def load(self) -> None:
        """Remember the folder's files as they are now."""
        for name in LOADED:
            with contextlib.suppress(OSError):
                self.loaded[name] = read_limited(self.folder / name, LIMIT)

    def write(self, name: str, content: bytes) -> None:
        """Change one of the folder's files."""
        write_atomically(self.folder / name, content)
        self.loaded[name] = content

    def checksums(self) -> dict[str, str]:
        """SHA-256 of the files that a checkpoint is bound to, as they were loaded."""
        return {name: hashlib.sha256(self.loaded[name]).hexdigest() for name in BOUND}

    def moved(self) -> bool:
        """Whether the folder is no longer to be found by its name."""
        return not self._is_ours(self.folder)

    def _is_ours(self, folder: Path) -> bool:
        try:
            return os.path.samestat(os.stat(folder), os.fstat(self._handle))
        except OSError:
            return False

    def follow(self) -> None:
        """Find the folder where it was moved to.

        Raises:
            MemspanError: it was deleted, or the system does not tell (other than Linux).
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
        """Where the folder is now; None: deleted, or the system does not tell (other than Linux)."""
        try:
            found = Path(os.readlink(f"/proc/self/fd/{self._handle}"))
        except OSError:
            return None
        return found if self._is_ours(found) else None

    def restore(self) -> list[str]:
        """Write files again that were changed or deleted; a line about each.

        Raises:
            MemspanError: that is not possible.
        """
        said = []
        for name, content in self.loaded.items():
            path = self.folder / name
            try:
                if read_limited(path, LIMIT) == content:
                    continue
                there = True
            except FileNotFoundError:
                there = False
            except OSError:
                there = True
            if not there:
                write_atomically(path, content)
                said.append(f"{path} was deleted while training: it is written again")
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
            said.append(
                f"{path} was changed while training, which does not change the run: it is written "
                f"again, and what was there is now {aside.name}"
            )
        return said


@contextlib.contextmanager
def claim(folder: Path) -> Iterator[Claim]:
    """Hold the folder for this trainer alone.

    Raises:
        MemspanError: another process is training in it, or it cannot be written.
    """
    if (folder / "checkpoints").is_symlink():
        raise MemspanError(
            f"{folder / 'checkpoints'} is a link out of the run's folder, where old checkpoints "
            "would be deleted: put the folder itself there"
        )
    with only_writer(folder) as handle:
        yield Claim(folder, handle)
