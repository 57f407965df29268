"""Operations in C: libraries that were built with the package (``hatch_build.py``), called by ctypes.

Nothing is compiled or written when memspan runs. There are libraries for several levels of the
processor; PyTorch says which it uses itself. Where there are none, :func:`available` is false and
PyTorch's loops are used instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from memspan.errors import MemspanError

BUILT = Path(__file__).parent / "built"
TYPES = {torch.float32: "float", torch.float64: "double"}
LEVELS = {"AVX512": "avx512", "AVX2": "avx2"}
"""Folders of libraries, by what PyTorch calls a level, highest first; else ``baseline``."""
SLOWER = "PyTorch's loops serve instead, several times slower for recurrences and single tokens"
REMEDY = "install memspan again, with pip's --force-reinstall --no-cache-dir --no-deps"


def available(
    source: Path,
    like: Tensor,
    bf16_weights: bool = False,
    loaded: Collection[torch.dtype] | None = None,
) -> bool:
    """True if the loops of the C file ``source`` can run on tensors such as ``like``; ``bf16_weights``:
    see :func:`functions`; ``loaded``: from :func:`loaded_types`, for torch.compile, which cannot
    trace the loading of a library (None: the operation finds out when it runs)."""
    if like.device.type != "cpu" or like.dtype not in TYPES:
        return False
    if torch.compiler.is_compiling():
        return loaded is None or like.dtype in loaded
    return functions(source, like.dtype, bf16_weights) is not None


def loaded_types(source: Path) -> tuple[torch.dtype, ...]:
    """Load the loops of the C file ``source``: the types that there are loops for."""
    return tuple(each for each in TYPES if functions(source, each, False) is not None)


def obstacle(alternative: str) -> str:
    """Why a compiled implementation cannot run if :func:`available` is false, with a remedy."""
    return (
        "needs a CPU, float32 or float64, and the loops in C, of which `memspan --version` says more: "
        f"use {alternative}"
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
    """The functions of the C file ``source`` for this type; None if unavailable. ``bf16_weights``:
    fixed matrices are kept in bfloat16."""
    number = "bfloat16" if bf16_weights else TYPES[dtype]
    # The library is named for the operation. Those that a level does not make faster are not in its
    # folder.
    name = f"{source.parent.name}-{number}.so"
    code = next(
        (_load(f"{each}/{name}") for each in _levels() if (BUILT / each / name).exists()), None
    )
    if code is not None:
        code.prepare.restype = ctypes.c_void_p
        code.release.restype = None
    return code


@functools.cache
def shares() -> ctypes.CDLL | None:
    """The library of ``shares.c``; None if unavailable."""
    code = _load("shares.so")
    if code is not None:
        code.in_shares.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 2
    return code


def level() -> str:
    """The highest folder of libraries that this processor and its operating system can run."""
    return LEVELS.get(torch.backends.cpu.get_cpu_capability(), "baseline")


def _levels() -> list[str]:
    """It and the folders below it, whose libraries run as well."""
    folders = [*LEVELS.values(), "baseline"]
    return folders[folders.index(level()) :]


def missing() -> str | None:
    """Why memspan was installed without libraries; None if it has some."""
    if (BUILT / "shares.so").exists():
        return None
    with contextlib.suppress(OSError):
        return (BUILT / "missing.txt").read_text(encoding="utf-8").strip()
    return "they were not built"


def _load(name: str) -> ctypes.CDLL | None:
    """A library; None if it is missing, which ``memspan --version`` says, or unusable, with a line on
    standard error."""
    path = BUILT / name
    if not path.exists():
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        # Of another machine, say, or on a file system from which nothing may be executed.
        _say(
            f"memspan: the loops in C cannot be loaded ({error}). {SLOWER}. To repair them, {REMEDY}"
        )
        return None


@functools.cache
def _say(line: str) -> None:
    """Print to standard error, once, and of several training processes only in the first."""
    if os.environ.get("RANK", "0") == "0":
        # A closed standard error must not stop the program.
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)
