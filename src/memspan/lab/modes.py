"""torch's modes and defaults as a new process has them, whatever the caller has set."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def usual_modes() -> Iterator[None]:
    """Make new tensors float32 and on the CPU, record gradients, and autocast nothing, inside.

    A run's options alone say how it computes, and they name neither torch's default type and device
    nor the modes of whoever calls. What is as usual already is left alone.
    """
    default = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        if default != torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, default)
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for kind in {"cpu", _accelerator()}:
            # Not left to each forward pass: backward passes and optimisers also multiply.
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield


def _accelerator() -> str:
    """The kind of the accelerator here, or ``cpu``."""
    found = torch.accelerator.current_accelerator()
    return "cpu" if found is None else found.type
