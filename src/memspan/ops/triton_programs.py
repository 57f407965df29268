"""Where programs in Triton can run: devices and types, the same for all operations that have some."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

INSTALLED = find_spec("triton") is not None
CAPABILITY = (8, 0)
"""The least that a GPU of NVIDIA needs."""
TYPES = (torch.float32, torch.bfloat16)
MISSING = "needs Triton: pip install triton, or use fused"


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
