"""Where programs in Triton can run: devices and types, the same for all operations that have some."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

OLDEST = (3, 6)
"""The oldest release of Triton that the programs were compiled with."""
CAPABILITY = (8, 0)
"""The least that a GPU of NVIDIA needs."""
TYPES = (torch.float32, torch.bfloat16)


def missing() -> str | None:
    """Why there is no Triton that could be given programs; None if there is, or one of another name."""
    if find_spec("triton") is None:
        return "needs Triton: pip install triton, or use fused"
    try:
        release = version("triton")
    except PackageNotFoundError:
        return None
    if tuple(int(n) for n in re.findall(r"\d+", release)[:2]) >= OLDEST:
        return None
    oldest = ".".join(map(str, OLDEST))
    return (
        f"needs Triton {oldest} or newer, not {release}: pip install --upgrade triton, or use fused"
    )


MISSING = missing()
"""The answer for this environment, given once: torch.compile cannot trace the question."""


def interpreted(program: Any) -> bool:
    """True if Triton was imported with ``TRITON_INTERPRET=1``: programs then run on a CPU, slowly."""
    from triton import JITFunction

    return not isinstance(program, JITFunction)


def obstacle(x: Tensor, program: Any) -> str | None:
    """Why ``program`` cannot run on tensors of the device and type of ``x``; None if it can."""
    if interpreted(program):
        if x.device.type not in ("cpu", "cuda"):
            return f"is interpreted on the CPU, and the tensors are on {x.device}: move them"
    elif x.device.type != "cuda":
        return (
            "needs CUDA: use fused, or set TRITON_INTERPRET=1 before Triton is imported to try it "
            "slowly on a CPU"
        )
    elif torch.version.hip is None and torch.cuda.get_device_capability(x.device) < CAPABILITY:
        return "needs a GPU of compute capability 8.0 or more: use fused"
    if x.dtype not in TYPES:
        kind = str(x.dtype).removeprefix("torch.")
        return f"takes float32 and bfloat16, not {kind}: convert, or use fused"
    return None
