"""Files that are wholly there or not at all, read with a limit, written by one process at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from memspan.errors import MemspanError

try:
    import fcntl

    LOCKS = True
except ImportError:  # a platform without them
    LOCKS = False


def write_atomically(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write ``content`` under a temporary name, flush it to the disk, then rename it to ``path``.

    It may come in pieces; what they raise is passed on, and nothing is written.

    Raises:
        MemspanError: the disk is full or the folder cannot be written; what stood at ``path`` stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        # A new file: a link of that name would lead elsewhere.
        with open(temporary, "xb") as file:
            for piece in [content] if isinstance(content, bytes) else content:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:
        # A read-only folder refuses this, too.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
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
        # No more than there is: room for all that is asked for is made before anything is read.
        content = file.read(min(limit, os.fstat(file.fileno()).st_size) + 1)
    if len(content) > limit:
        raise OSError(0, f"larger than {limit:,} bytes", str(path))
    return content


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[int]:
    """Refuse ``folder`` to a second process while this one writes there; a handle of the folder.

    The folder itself is locked, not a file in it that could be removed or replaced. The system lifts
    the lock with the process, however that dies. Without locks on the platform or the file system
    nothing is refused.

    Raises:
        MemspanError: another process has it, or the folder cannot be written.
    """
    with contextlib.ExitStack() as opened:

        def held(path: Path, how: int) -> int:
            handle = os.open(path, how | os.O_CLOEXEC, 0o644)
            opened.callback(os.close, handle)
            return handle

        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(0, "it is read-only")
            handle = held(folder, os.O_RDONLY)
            if LOCKS and not _lock(handle):
                # Network file systems lock files only. It stays: removing it would let others in.
                _lock(held(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW))
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
    """Whether there are locks for what is open.

    Raises:
        BlockingIOError: another process holds it.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True
