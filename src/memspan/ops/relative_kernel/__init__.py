"""Relative attention as Triton programs: where they can run. See the README of this folder."""

from __future__ import annotations

import torch
from torch import Tensor

from memspan.ops import triton_programs
from memspan.ops.limits import Limits

WIDEST = 128
"""The widest head."""


def obstacle(q: Tensor, v: Tensor, mask: Tensor | Limits | None) -> str | None:
    """Why the programs cannot attend for ``q [B, H, T, K]``, ``v [B, H, S, V]`` and this mask;
    None if they can. To look at a mask is to wait for the device; limits are not looked at."""
    if isinstance(mask, Tensor) and torch.compiler.is_compiling():
        return "cannot look at a mask under torch.compile: pass Limits, or use fused"
    if triton_programs.MISSING is not None:
        return triton_programs.MISSING
    from memspan.ops.relative_kernel import kernel

    if reason := triton_programs.obstacle(q, kernel.forward):
        return reason
    if max(q.shape[3], v.shape[3]) > WIDEST:
        return f"takes heads up to {WIDEST} wide, not {max(q.shape[3], v.shape[3])}: use fused"
    if isinstance(mask, Tensor) and not _is_one_run(mask):
        return "takes masks that are one run of keys per query: use fused"
    return None


def _is_one_run(mask: Tensor) -> bool:
    """True if each query of ``mask [B or 1, T, S]`` sees the keys from one to another."""
    return bool((Limits.of(mask).mask(mask.shape[2]) == mask).all())
