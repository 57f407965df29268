"""Devices by name, and what may be asked of them without waiting."""

from __future__ import annotations

import torch
from torch import Tensor

from memspan.errors import MemspanError


def device_for(name: str) -> torch.device:
    """The device called ``name``, if there is one; ``auto`` is CUDA if available, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name).item()
        device = torch.device(name)
        if device.type != "cpu" or not device.index:
            return device
        raise RuntimeError("PyTorch accepts any index for the CPU, and there is only one")
    # ImportError: a device whose backend is another package, such as hpu.
    except (RuntimeError, AssertionError, ImportError):
        raise MemspanError(f"there is no device {name!r} here: use cpu") from None


def can_look(x: Tensor) -> bool:
    """Check that Python can branch on ``x`` without waiting for a device or breaking a graph."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)
