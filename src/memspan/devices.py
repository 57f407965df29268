"""Devices by name, what may be asked of them without waiting, and tensors that are to go together."""

from __future__ import annotations

import torch
from torch import Tensor

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


def can_look(x: Tensor) -> bool:
    """Whether Python can branch on ``x`` without waiting for a device or breaking a graph."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def check_together(alike: bool = True, /, **tensors: Tensor | None) -> None:
    """Refuse tensors of one operation, by name, that are no floating-point tensors on one device or,
    with ``alike``, are of different types. Those that are None are not there."""
    given = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    first_name, first = given[0]
    for name, tensor in given:
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise MemspanError(f"{name} must be a floating-point tensor, not {kind}: convert it")
        if tensor.device != first.device:
            raise MemspanError(
                f"{name} is on {tensor.device} and {first_name} on {first.device}: move one of them"
            )
        if alike and tensor.dtype != first.dtype:
            raise MemspanError(
                f"{name} is {_name(tensor.dtype)} and {first_name} {_name(first.dtype)}: convert one "
                "of them"
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
