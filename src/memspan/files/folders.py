"""Folders as open handles, which stay with a folder that is moved or replaced. Windows has none."""

from __future__ import annotations

import os
from pathlib import Path

HANDLES = os.open in os.supports_dir_fd
"""Whether this system opens folders like files."""


def open_folder(folder: Path) -> int | None:
    """A handle of ``folder``, for the caller to close; None: this system has none.

    Raises:
        OSError: it cannot be opened.
    """
    return os.open(folder, os.O_RDONLY) if HANDLES else None


def sync_folder(folder: Path) -> None:
    """Flush renames inside ``folder`` to disk; without handles, the system does so in its own time."""
    handle = open_folder(folder)
    if handle is not None:
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
