"""Operations in C: compiled once with the machine's C compiler, stored in the cache, called by ctypes.

Without a compiler, or with ``MEMSPAN_COMPILE=0``, :func:`available` is false and PyTorch's loops are
used instead.

Code in the cache is executed, so only this user may have written it. It lives in a folder ``code-UID``
that no other account can open.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from memspan.errors import MemspanError
from memspan.files.disk import LOCKS, cache_folder, write_atomically

if LOCKS:
    import fcntl

SHARED = tuple(sorted(Path(__file__).parent.glob("*.h")))
"""What the C files include."""
# NaN and infinity must stay what they are.
FLAGS = ("-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fPIC")
TYPES = {torch.float32: "float", torch.float64: "double"}
COMPILER_SECONDS = 600


def available(source: Path, like: Tensor, bf16_weights: bool = False) -> bool:
    """True if the loops of the C file ``source`` can run on tensors such as ``like``; ``bf16_weights``:
    see :func:`functions`."""
    if like.device.type != "cpu" or like.dtype not in TYPES:
        return False
    # torch.compile cannot trace the search for a compiler: the operation finds out when it runs.
    return torch.compiler.is_compiling() or functions(source, like.dtype, bf16_weights) is not None


def obstacle(alternative: str) -> str:
    """Why a compiled implementation cannot run if :func:`available` is false, with a remedy."""
    return (
        "needs a CPU, float32 or float64, a C compiler (cc), and MEMSPAN_COMPILE other than 0: use "
        f"{alternative}"
    )


def refuse_without_memory(done: object) -> None:
    """Raise :class:`MemspanError` where a function in C could not allocate what it needs: it then
    returns null or 0."""
    if not done:
        raise MemspanError(
            "this machine's memory is full: use a smaller batch, or shorter segments"
        )


@functools.cache
def functions(source: Path, dtype: torch.dtype, bf16_weights: bool) -> ctypes.CDLL | None:
    """The functions of the C file ``source`` for this type; None if unavailable, with the reason on
    standard error. ``bf16_weights``: fixed matrices are kept in bfloat16."""
    if os.environ.get("MEMSPAN_COMPILE") == "0" or os.name != "posix":
        return None
    try:
        flags = (*FLAGS, f"-DREAL={TYPES[dtype]}", *["-DBFLOAT16"] * bf16_weights)
        code = _compiled(source, flags)
    except MemspanError as error:
        _say(
            f"memspan: {error}. PyTorch's loops serve instead, several times slower for Feedback, Fast "
            "Weights and single tokens; MEMSPAN_COMPILE=0 chooses them without this line"
        )
        return None
    code.prepare.restype = ctypes.c_void_p
    code.release.restype = None
    return code


def _compiled(source: Path, flags: tuple[str, ...]) -> ctypes.CDLL:
    """The code of ``source`` from the cache, compiled first if it is not there.

    Raises:
        MemspanError: there is no compiler or it fails, or the cache cannot be used.
    """
    wanted = os.environ.get("CC", "cc")
    compiler = shutil.which(wanted)
    if compiler is None:
        raise MemspanError(f"there is no C compiler {wanted!r}: install one, or name it in CC")
    compiler = os.path.abspath(compiler)
    # Code for this processor may not run on another that shares the cache.
    own = sorted(source.parent.glob("*.h"))
    texts = [file.read_bytes() for file in (source, *own, *SHARED)]
    key = repr((texts, compiler, flags, _processor()))
    # The folder is named for the operation.
    name = source.parent.name
    file = f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    cache = cache_folder().absolute()
    folder = cache / f"code-{os.geteuid()}"
    try:
        with _alone_in(folder):
            code = _load(folder / file)
            if code is None:
                _say(
                    f"memspan: compiling {name}/{source.name}, once on this machine (some seconds)"
                )
                _build(source, compiler, flags, folder / file)
                code = _load(folder / file)
    except OSError as error:
        reason = error.strerror or str(error)
        raise MemspanError(
            f"compiled code cannot be kept in {cache} ({reason}): set MEMSPAN_CACHE to a folder of "
            "your own"
        ) from None
    if code is None:
        raise MemspanError(
            f"code from the compiler {compiler} cannot be loaded: name another in CC"
        )
    return code


@contextlib.contextmanager
def _alone_in(path: Path) -> Iterator[None]:
    """The folder at ``path``, created if needed, for one process at a time. Leftovers of killed
    compilations are removed.

    Raises:
        OSError: it cannot be made or used, or is not this user's alone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(0, f"{path.name} is not this user's alone")
        # Others wait, then find what they need. Not all file systems have locks.
        with contextlib.suppress(OSError):
            if LOCKS:
                fcntl.flock(handle, fcntl.LOCK_EX)
                _remove_leftovers(path)
        yield
    finally:
        os.close(handle)


def _remove_leftovers(folder: Path) -> None:
    for path in folder.iterdir():
        if path.suffix not in (".so", ".sha256"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _build(source: Path, compiler: str, flags: tuple[str, ...], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / "loop.o"
        linked = Path(folder) / "loop.so"
        # In two steps: linking with -ffast-math would change arithmetic in the whole process.
        _run(
            [compiler, *flags, f"-I{Path(__file__).parent}", "-c", str(source), "-o", str(made)],
            made,
        )
        _run([compiler, "-shared", str(made), "-o", str(linked), "-lm"], linked)
        check = hashlib.sha256(linked.read_bytes()).hexdigest()
        linked.chmod(0o700)
        os.replace(linked, path)
        write_atomically(path.with_suffix(".sha256"), check.encode())


def _run(command: list[str], made: Path) -> None:
    try:
        # Not in the current folder: linkers take a libgcc_s.so.1 that lies there.
        done = subprocess.run(
            command, capture_output=True, timeout=COMPILER_SECONDS, cwd=made.parent
        )
        if done.returncode == 0 and made.is_file():
            return
        reason = done.stderr.decode(errors="replace").strip()[:300] or f"status {done.returncode}"
    except subprocess.TimeoutExpired:
        reason = f"nothing within {COMPILER_SECONDS} s"
    raise MemspanError(
        f"the compiler {command[0]} fails ({reason}): repair it, or name another in CC"
    )


def _load(path: Path) -> ctypes.CDLL | None:
    """The library; None if it is missing or damaged, which would crash instead of raising an error."""
    try:
        made = path.read_bytes()
        check = path.with_suffix(".sha256").read_bytes()
    except OSError:
        return None
    if hashlib.sha256(made).hexdigest().encode() != check:
        return None
    return ctypes.CDLL(str(path))


@functools.cache
def _say(line: str) -> None:
    """Print to standard error, once, and of several training processes only in the first."""
    if os.environ.get("RANK", "0") == "0":
        # A closed standard error must not stop the program.
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "model name"))}))
