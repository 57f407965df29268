"""The device of laws and golden tests: ``MEMSPAN_DEVICE``, without it the CPU.

These tests name no device. With the variable set, what they make is made on the CPU and moved, so that
random numbers are those of a CPU, and models are moved when they have been made. What memspan itself
makes stays where memspan puts it: a tensor that it forgets to put beside the others is an error.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memspan.models import MODELS, LanguageModel

CHOSEN = os.environ.get("MEMSPAN_DEVICE")
TESTS = str(Path(__file__).resolve().parent)
MAKERS = {
    torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand,
    torch.randint, torch.randn, torch.randperm, torch.tensor, torch.zeros,
}  # fmt: skip


class Moved(TorchFunctionMode):
    """Moves to ``device`` what code in this folder makes without naming one."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func not in MAKERS or "device" in (kwargs or {}):
            return made
        if not sys._getframe(1).f_code.co_filename.startswith(TESTS):
            return made
        return made.detach().to(self.device).requires_grad_(made.requires_grad)


def run_tests_on(device: str) -> None:
    """From now on, in this process."""
    Moved(device).__enter__()
    for config in MODELS.values():
        config.build = _moving(config.build, device)  # type: ignore[method-assign]
    made = LanguageModel.__init__

    @functools.wraps(made)
    def make(model: LanguageModel, *args: Any, **options: Any) -> None:
        made(model, *args, **options)
        model.to(device)

    LanguageModel.__init__ = make  # type: ignore[method-assign]


def _moving(build: Callable[[Any], Any], device: str) -> Callable[[Any], Any]:
    return functools.wraps(build)(lambda config: build(config).to(device))
