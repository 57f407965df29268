"""Small and read-only file systems, where this process is allowed to mount them."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def mounted(kind: str, place: Path, options: str) -> Iterator[None]:
    if kind == "bind":
        mount("--bind", str(place), str(place))
    else:
        mount("-t", kind, "-o", options, "none", str(place))
    try:
        yield
        if kind == "tmpfs":
            shutil.copytree(place, place.with_name("kept"))
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def own_mounts() -> bool:
    """Give this process its own mounts, which end with it; returns whether that is allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare") or libc.unshare(0x20000) != 0:
        return False
    try:
        mount("--make-rprivate", "/")
        with tempfile.TemporaryDirectory() as folder, mounted("bind", Path(folder), ""):
            return True
    except (subprocess.CalledProcessError, OSError):
        return False


def can_be_immutable(root: Path) -> bool:
    with tempfile.TemporaryDirectory(dir=root) as folder:
        try:
            for flag in ("+i", "-i"):
                subprocess.run(["chattr", flag, folder], check=True, capture_output=True)
        except (subprocess.CalledProcessError, OSError):
            return False
    return True
