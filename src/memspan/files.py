"""Files that are wholly there or not at all, read with a limit, written by one process at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from memspan.errors import MemspanError

try:
    import fcntl

    LOCKS = True
except ImportError:  # a platform without them
    LOCKS = False


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
        # A read-only folder refuses this, too.
        with contextlib.suppress(OSError):
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


def read_limited(path: Path, limit: int) -> bytes:
    """The content of a regular file: not a pipe, which would be waited for, or an endless device.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be read, is no regular file, or has more than ``limit`` bytes.
    """
    if path.exists() and not path.is_file():
        raise OSError(0, "no regular file", str(path))
    with open(path, "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(0, f"larger than {limit:,} bytes", str(path))
    return content


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Refuse ``folder`` to a second process while this one writes there.

    The system ends the claim with the process, however that dies. Without such locks on the platform
    or the file system there is no claim.

    Raises:
        MemspanError: another process has it, or the folder cannot be written.
    """
    if not LOCKS:
        yield
        return
    path = folder / ".lock"
    handle = _claim(folder, path)
    try:
        yield
    finally:
        # Removed while it is still ours; whoever waits for it then finds that it has gone.
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(handle)


def _claim(folder: Path, path: Path) -> int:
    handle = -1
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise MemspanError(
                    f"another process is training in {folder}: wait until it ends, stop it, or "
                    "choose another folder"
                ) from None
            except OSError:
                return handle  # a file system without locks
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(path)):
                    return handle
            os.close(handle)  # its last owner removed it while we opened it
            handle = -1
    except MemspanError:
        os.close(handle)
        raise
    except OSError as error:
        raise MemspanError(
            f"cannot write in {folder} ({error.strerror}): check its permissions, free some space "
            "or choose another folder"
        ) from None
