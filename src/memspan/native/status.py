"""The state of the loops in C, as ``memspan --version`` prints it."""

from __future__ import annotations

from memspan.native import library
from memspan.native.threads import parallel


def status() -> str:
    """One line: the level that is used and its threads, or why there are no loops in C."""
    reason = library.missing()
    if reason is not None:
        return (
            f"loops in C: none, since memspan was installed without them ({reason}). {library.SLOWER}. "
            f"With a C compiler, {library.REMEDY}"
        )
    if library.shares() is None:
        return "loops in C: none that can be loaded"
    threads = "one thread" if parallel() is None else "the threads of PyTorch's OpenMP"
    return f"loops in C: {library.level()}, {threads}"
