"""Files and folders on disk: written completely or not at all, read up to a limit, locked, cached."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from memspan.errors import MemspanError, UnreadableError

try:
    import fcntl

    LOCKS = True
except ImportError:  # on Windows
    LOCKS = False
FOLDERS_OPEN = os.open in os.supports_dir_fd
"""True where the system opens folders like files; Windows does not."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk or quota."""


def path_of(name: str | os.PathLike[str]) -> Path:
    """A path as people write it: ``~`` at its beginning is the home directory, as in a shell."""
    # Not Path.expanduser, which raises for an unknown user.
    return Path(os.path.expanduser(name))


def write_atomically(
    path: Path,
    content: bytes | Iterable[bytes | memoryview] | Callable[[Path], object],
    *,
    make_folder: bool = True,
) -> None:
    """Write ``content`` under a temporary name, flush it to disk, then rename it to ``path``.

    Args:
        path: the file.
        content: all of it, pieces in order, or a function that writes or replaces the file at the path
            that it is given; errors of the iterator or function are passed on.
        make_folder: make the file's folder if it is missing.

    Raises:
        MemspanError: the disk is full or the folder cannot be written. Whatever is raised, the old
            content of ``path`` stays.
    """
    temporary = _temporary(path)
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        # Exclusive: a link planted under that name would lead elsewhere.
        with open(temporary, "xb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not callable(content):
                file.writelines([content] if isinstance(content, bytes) else content)
                file.flush()
                os.fsync(file.fileno())
        if callable(content):
            content(temporary)
            # Libraries that replace the file make one that only its owner may read.
            os.chmod(temporary, stat.S_IMODE(mode))
            with open(temporary, "r+b") as file:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:
        # A read-only folder refuses this, too.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise unwritable(path, error, "; what was there before is untouched") from None


def link_atomically(source: Path, path: Path) -> None:
    """Make ``path`` a second name of the file ``source``, or a copy where the disk has no links.

    Raises:
        OSError: it failed; the old content of ``path`` stays.
    """
    temporary = _temporary(path)
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
    os.replace(temporary, path)
    # POSIX: renaming one name of a file to another name of the same file does nothing.
    temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def _temporary(path: Path) -> Path:
    """A name that no other process and no other thread writes to."""
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}.tmp")


def open_regular(path: Path) -> BinaryIO:
    """A regular file, open for reading; a pipe would block, a device may never end.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be read, or is not a regular file.
    """
    if path.exists() and not path.is_file():
        raise OSError(0, "not a regular file", str(path))
    return open(path, "rb")


def read_limited(path: Path, limit: int) -> bytes:
    """The content of a regular file.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be read, is not a regular file, or has more than ``limit`` bytes.
    """
    with open_regular(path) as file:
        # No more than the file's size: read() allocates what it is asked for.
        content = file.read(min(limit, os.fstat(file.fileno()).st_size) + 1)
    if len(content) > limit:
        raise OSError(0, f"larger than {limit:,} bytes", str(path))
    return content


def unreadable(path: Path | str, error: OSError) -> MemspanError:
    """The error for a file of ours that was not read: the system refused, or it is not such a file."""
    if error.errno:
        return UnreadableError(
            f"cannot read {path} ({error.strerror}): check its permissions and the disk, then try again"
        )
    return MemspanError(f"{path} is damaged ({error.strerror}): restore it")


def unwritable(path: Path, error: OSError, note: str = "") -> MemspanError:
    """The error for a failed write; ``note`` ends the line, unless the path is in the cache."""
    with contextlib.suppress(MemspanError):
        cache = cache_folder()
        if path.absolute().is_relative_to(cache.absolute()):
            space = f"{remedy(error)}, or " if error.errno in FULL else ""
            return MemspanError(
                f"cannot write in the cache, {cache} ({error.strerror}): {space}set MEMSPAN_CACHE to a "
                "folder of your own"
            )
    return MemspanError(
        f"cannot write {path} ({error.strerror}): {remedy(error)} or choose another folder{note}"
    )


def remedy(error: OSError) -> str:
    """The first thing to do about a failed write."""
    return "free some space" if error.errno in FULL else "check the path and its permissions"


def sync_folder(folder: Path) -> None:
    """Flush renames inside ``folder`` to disk; where folders cannot be opened, the system does that."""
    if FOLDERS_OPEN:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Lock ``folder``, which is made if it is missing, against other writers.

    The folder itself is locked, not a file in it, which could be deleted or replaced. The system
    releases the lock when the process dies, however it dies. Where neither the platform nor the file
    system has locks, other writers are not refused.

    Raises:
        MemspanError: another process holds the lock, or the folder cannot be written.
    """
    with contextlib.ExitStack() as opened:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(0, "it is read-only")
            # Network file systems lock only files. That one is never removed: a second process could
            # then lock a new one.
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
            for path, how in ((folder, os.O_RDONLY), (folder / ".lock", flags)) if LOCKS else ():
                handle = os.open(path, how, 0o644)
                opened.callback(_close, handle)
                if _lock(handle):
                    break
        except BlockingIOError:
            raise MemspanError(
                f"another process is training in {folder}: wait until it ends, stop it, or "
                "choose another folder"
            ) from None
        except OSError as error:
            raise unwritable(folder, error) from None
        yield


def _close(handle: int) -> None:
    # Nothing was written to it that could be lost.
    with contextlib.suppress(OSError):
        os.close(handle)


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


def cache_folder() -> Path:
    """The folder of downloads and tokenised corpora, all of which can be made again.

    ``MEMSPAN_CACHE`` names it; otherwise it is in the system's own cache folder.

    Raises:
        MemspanError: the user has no home, as in a container that runs under any number.
    """
    import platformdirs

    try:
        return Path(os.environ.get("MEMSPAN_CACHE") or platformdirs.user_cache_dir("memspan"))
    except RuntimeError:
        raise MemspanError(
            "there is no folder for the cache, since this user has no home: set MEMSPAN_CACHE to a "
            "folder of your own"
        ) from None
