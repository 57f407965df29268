"""A run's folder while it is trained: locked, and its options protected."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from memspan.errors import MemspanError
from memspan.files.disk import link_atomically, only_writer, read_limited, write_atomically
from memspan.runs.places import refuse_shipped

BOUND = ("config.toml", "tokenizer.json")
"""Files whose checksums are in every checkpoint."""
LOADED = (*BOUND, "history.jsonl")
"""Files that a run continues from, besides its checkpoints."""
LIMIT = 1 << 28
"""Maximum size of such a file in bytes."""


class RunLock:
    """A run's folder, locked by this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loaded: dict[str, bytes] = {}
        """Content of the files in :data:`LOADED` when the run was created or resumed."""
        self._identity = os.stat(folder)

    def load(self) -> None:
        """Read the files in :data:`LOADED`."""
        for name in LOADED:
            with contextlib.suppress(OSError):
                self.loaded[name] = read_limited(self.folder / name, LIMIT)

    def write(self, name: str, content: bytes) -> None:
        """Change one of these files."""
        write_atomically(self.folder / name, content)
        self.loaded[name] = content

    def checksums(self) -> dict[str, str]:
        """SHA-256 of the files in :data:`BOUND` as they were loaded, by name."""
        return {name: hashlib.sha256(self.loaded[name]).hexdigest() for name in BOUND}

    @property
    def is_in_place(self) -> bool:
        """Whether the folder at this path is still the one that was locked."""
        try:
            return os.path.samestat(os.stat(self.folder), self._identity)
        except OSError:
            return False

    def refuse_moved(self) -> None:
        """Raise :class:`MemspanError` where the folder was moved, deleted or replaced."""
        if not self.is_in_place:
            raise MemspanError(
                f"the run's folder {self.folder} was moved, deleted or replaced while it was trained: "
                "its checkpoints are as they were; go on from the last one with --resume and the path "
                "where the folder is now"
            ) from None

    def restore(self) -> list[str]:
        """Write files again that were changed or deleted since they were loaded.

        Returns:
            A line for the user about each.

        Raises:
            MemspanError: one of them cannot be written.
        """
        lines = []
        for name, content in self.loaded.items():
            path, aside = self.folder / name, self.folder / f"{name}.changed"
            with contextlib.suppress(OSError):
                if read_limited(path, LIMIT) == content:
                    continue
            try:
                link_atomically(path, aside)
                lines.append(
                    f"{path} was changed while training, which does not change the run: it is written "
                    f"again, and what was there is now {aside.name}"
                )
            except FileNotFoundError:
                lines.append(f"{path} was deleted while training: it is written again")
            except OSError as error:
                raise MemspanError(
                    f"{path} was changed while training and cannot be written again "
                    f"({error.strerror}): move it away, then --resume"
                ) from None
            write_atomically(path, content)
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
    with only_writer(folder):
        yield RunLock(folder)
