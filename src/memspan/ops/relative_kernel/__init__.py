"""Relative attention as Triton programs: where they can run. See the README of this folder."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from memspan.ops.limits import Limits

WIDEST = 128
"""The widest head."""
INSTALLED = find_spec("triton") is not None
CAPABILITY = (8, 0)
"""The least that a GPU of NVIDIA needs."""


def obstacle(q: Tensor, v: Tensor, mask: Tensor | Limits | None) -> str | None:
    """Why the programs cannot attend for ``q [B, H, T, K]``, ``v [B, H, S, V]`` and this mask;
    None if they can. To look at a mask is to wait for the device; limits are not looked at."""
    if isinstance(mask, Tensor) and torch.compiler.is_compiling():
        return "cannot look at a mask under torch.compile: pass Limits, or use fused"
    if not INSTALLED:
        return "needs Triton: pip install triton, or use fused"
    from memspan.ops.relative_kernel import launch

    if launch.interpreted():
        if q.device.type not in ("cpu", "cuda"):
            return f"is interpreted on the CPU, and the tensors are on {q.device}: move them"
    elif q.device.type != "cuda":
        return (
            "needs CUDA: use fused, or set TRITON_INTERPRET=1 before Triton is imported to try it "
            "slowly on a CPU"
        )
    elif torch.version.hip is None and torch.cuda.get_device_capability(q.device) < CAPABILITY:
        return "needs a GPU of compute capability 8.0 or more: use fused"
    if q.dtype not in (torch.float32, torch.bfloat16):
        kind = str(q.dtype).removeprefix("torch.")
        return f"takes float32 and bfloat16, not {kind}: convert, or use fused"
    if max(q.shape[3], v.shape[3]) > WIDEST:
        return f"takes heads up to {WIDEST} wide, not {max(q.shape[3], v.shape[3])}: use fused"
    if isinstance(mask, Tensor) and not _is_one_run(mask):
        return "takes masks that are one run of keys per query: use fused"
    return None


def _is_one_run(mask: Tensor) -> bool:
    """True if each query of ``mask [B or 1, T, S]`` sees the keys from one to another."""
    return bool((Limits.of(mask).mask(mask.shape[2]) == mask).all())
