"""A folder's lock: one process at a time writes there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from memspan.errors import MemspanError
from memspan.files.folders import open_folder

try:
    import fcntl

    LOCKS = True
except ImportError:  # the platform has none
    LOCKS = False


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[int | None]:
    """Lock ``folder`` against other writers; yields an open handle of the folder, if there is such.

    The folder itself is locked, not a file in it, which could be deleted or replaced; the handle stays
    valid when the folder is moved. The system releases the lock when the process dies, however it dies.
    Where neither the platform nor the file system has locks, no other writer is refused.

    Raises:
        MemspanError: another process holds the lock, or the folder cannot be written.
    """
    with contextlib.ExitStack() as opened:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(0, "it is read-only")
            handle = open_folder(folder)
            if handle is not None:
                opened.callback(os.close, handle)
                if LOCKS and not _lock(handle):
                    # Network file systems lock only files. The file is never removed: a second
                    # process could then lock a new one.
                    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
                    file = os.open(folder / ".lock", flags, 0o644)
                    opened.callback(os.close, file)
                    _lock(file)
        except BlockingIOError:
            raise MemspanError(
                f"another process is training in {folder}: wait until it ends, stop it, or "
                "choose another folder"
            ) from None
        except OSError as error:
            raise MemspanError(
                f"cannot write in {folder} ({error.strerror}): check its permissions, free some "
                "space or choose another folder"
            ) from None
        yield handle


def _lock(handle: int) -> bool:
    """Lock an open file or folder. False: the file system has no locks for it.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True
