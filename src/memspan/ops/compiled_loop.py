"""C files beside this one: compiled once with the machine's C compiler, kept in the cache, called by
ctypes. Here also: the Feedback Transformer's.

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
import weakref
from pathlib import Path

import platformdirs
import torch
from torch import Tensor

from memspan.errors import MemspanError
from memspan.files import write_atomically

FOLDER = Path(__file__).parent
FEEDBACK = "feedback_loop"
FLAGS = {
    FEEDBACK: ("-O3", "-march=native", "-ffast-math", "-fPIC"),
    # Features that are not finite must stay in sight.
    "delta_rule_loop": ("-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fPIC"),
}
TYPES = {torch.float32: "float", torch.float64: "double"}
INTEGERS = (
    "steps", "batch", "d_model", "n_heads", "width", "d_ff", "n_layers", "groups", "n_old", "span",
    "gelu", "kv_stride", "norms_memory",
)  # fmt: skip
POINTERS = (
    "query", "query_bias", "position_keys", "position_scores", "output", "inner", "inner_bias",
    "outer", "memory", "memory_bias", "mix", "hidden", "seen", "states", "middles", "queries",
    "attended", "activated", "before", "vectors", "kv", "moments", "memory_moments",
    "probabilities", "d_out",
    "d_vectors", "d_states", "d_middles", "d_inner", "d_query", "d_first", "d_mixed", "d_projected",
    "d_kv", "d_position_keys", "d_position_scores",
)  # fmt: skip


class _Loop(ctypes.Structure):
    """``Loop`` in C, field by field."""

    _fields_ = (
        [(name, ctypes.c_long) for name in INTEGERS]
        + [("eps", ctypes.c_double)]
        + [(name, ctypes.c_void_p) for name in POINTERS]
    )  # fmt: skip


def available(like: Tensor, name: str = FEEDBACK) -> bool:
    """Whether the loops of ``name.c`` can run on tensors such as ``like``."""
    if like.device.type != "cpu" or like.dtype not in TYPES:
        return False
    return library(name, like.dtype) is not None


class CompiledLoop:
    """The loop for certain weights and sizes; what is given later replaces what was given before.

    All tensors are contiguous and of one type, and live as long as this.
    """

    def __init__(self, eps: float, integers: dict[str, int], tensors: dict[str, Tensor]) -> None:
        code = library(FEEDBACK, next(iter(tensors.values())).dtype)
        assert code is not None
        self._library, self._loop = code, _Loop(eps=eps)
        self._tensors: dict[str, Tensor] = {}
        self.give(integers, tensors)
        self._weights = ctypes.c_void_p(code.prepare(ctypes.byref(self._loop)))
        weakref.finalize(self, code.release, self._weights)

    def give(self, integers: dict[str, int], tensors: dict[str, Tensor]) -> None:
        for name, integer in integers.items():
            setattr(self._loop, name, integer)
        for name, tensor in tensors.items():
            assert tensor.is_contiguous(), name
            setattr(self._loop, name, tensor.data_ptr())
        self._tensors |= tensors

    def forward(self, kv_offset: int = 0) -> None:
        """Read ``steps`` tokens. Keys and values start ``kv_offset`` slots into their buffer."""
        kv = self._tensors["kv"]
        self._loop.kv = kv.data_ptr() + kv_offset * kv.element_size()
        self._library.forward(ctypes.byref(self._loop), self._weights)

    def backward(self) -> None:
        """And back, after a forward with the same tensors."""
        self._library.backward(ctypes.byref(self._loop))


@functools.cache
def library(name: str, dtype: torch.dtype) -> ctypes.CDLL | None:
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
