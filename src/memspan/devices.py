"""Devices by name."""

from __future__ import annotations

import torch

from memspan.errors import MemspanError


def device_for(name: str) -> torch.device:
    """The device called ``name``; ``auto`` is CUDA where there is one, else the CPU.

    Raises:
        MemspanError: this machine has no such device.
    """
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
