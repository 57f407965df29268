"""The C files beside this one: compiled once with the machine's C compiler, kept in the cache, and
called by ctypes.

Without a compiler, or with ``MEMSPAN_COMPILE=0``, :func:`available` is false, and the loops in PyTorch
serve.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import platformdirs
import torch
from torch import Tensor

from memspan.errors import MemspanError
from memspan.files import write_atomically

FOLDER = Path(__file__).parent
FLAGS = {
    "feedback_loop": ("-O3", "-march=native", "-ffast-math", "-fPIC"),
    # Features that are not finite must stay in sight.
    "delta_rule_loop": ("-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fPIC"),
}
TYPES = {torch.float32: "float", torch.float64: "double"}


def available(name: str, like: Tensor) -> bool:
    """Whether the loops of ``name.c`` can run on tensors such as ``like``."""
    if like.device.type != "cpu" or like.dtype not in TYPES:
        return False
    return functions(name, like.dtype) is not None


@functools.cache
def functions(name: str, dtype: torch.dtype) -> ctypes.CDLL | None:
    """The functions of ``name.c`` for numbers of this type; None where they cannot be had."""
    if os.environ.get("MEMSPAN_COMPILE") == "0" or os.name != "posix":
        return None
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None
    flags = (*FLAGS[name], f"-DREAL={TYPES[dtype]}")
    source, shared = FOLDER / f"{name}.c", FOLDER / "loop.h"
    # Code for this processor is no good for another that shares the cache.
    key = repr((source.read_bytes(), shared.read_bytes(), compiler, flags, _processor()))
    cache = Path(os.environ.get("MEMSPAN_CACHE") or platformdirs.user_cache_dir("memspan"))
    path = cache / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    try:
        if not _intact(path):
            _build(source, compiler, flags, path)
        code = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError, MemspanError):
        return None
    code.prepare.restype = ctypes.c_void_p
    code.forward.restype = code.backward.restype = code.release.restype = None
    return code


def _build(source: Path, compiler: str, flags: tuple[str, ...], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made, linked = Path(folder) / "loop.o", Path(folder) / "loop.so"
        # In two steps: linking with -ffast-math would change arithmetic in the whole process.
        for command in (
            [compiler, *flags, "-c", str(source), "-o", str(made)],
            [compiler, "-shared", str(made), "-o", str(linked), "-lm"],
        ):
            subprocess.run(command, check=True, capture_output=True, timeout=120)
        check = hashlib.sha256(linked.read_bytes()).hexdigest()
        linked.chmod(0o755)
        os.replace(linked, path)
        write_atomically(path.with_suffix(".sha256"), check.encode())


def _intact(path: Path) -> bool:
    """Whether ``path`` is what was built: it is code, so damage would not be an error but a crash, and
    only this user may have written it."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o022:
            return False
        if status.st_uid not in (0, os.getuid()):
            return False
        check = hashlib.sha256(path.read_bytes()).hexdigest()
        return path.with_suffix(".sha256").read_text() == check
    except (OSError, ValueError):
        return False


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "model name"))}))
