"""Writing a file so that it is either wholly there or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from memspan.errors import MemspanError


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` under a temporary name, flush it to the disk, then rename it to ``path``.

    Raises:
        MemspanError: the disk is full or the folder cannot be written; what stood at ``path`` stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise MemspanError(
            f"cannot write {path} ({error.strerror}): free some space or choose another folder; "
            "what was there before is untouched"
        ) from None


def sync_folder(folder: Path) -> None:
    """Make renames inside ``folder`` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
