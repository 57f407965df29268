"""CUDA graphs: many small kernels, recorded once and launched together.

A graph reads and writes the same memory at each replay. What it is given is therefore copied to where
it reads, and what it computes is valid until the next replay. Whatever runs in a capture must not wait
for the device or copy from the host, and no number that Python knows may change between replays.

**Nothing here has been run on a GPU yet**: see ``docs/gpu.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

R = TypeVar("R")

DEVICE = "cuda"
WARM_UP = 3
"""Calls before the capture, in which libraries choose their kernels and make their work space."""


def obstacle(device: torch.device) -> str | None:
    """Why nothing on ``device`` can be captured, with a remedy; None if it can."""
    if device.type != DEVICE:
        return f"needs CUDA, and the model is on {device}: move it, or leave the option out"
    return None


class Captured(Generic[R]):
    """A function of no arguments, captured in a CUDA graph, whose kernels run again at each
    :meth:`replay`.

    The function has run ``WARM_UP`` times before: set tensors anew that it changes in place. All that
    it reads must live as long as this.
    """

    def __init__(self, function: Callable[[], R], device: torch.device) -> None:
        self._function = function
        with torch.cuda.device(device):
            before = torch.cuda.current_stream()
            stream = torch.cuda.Stream()
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    function()
            before.wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self.result = function()

    def replay(self) -> R:
        """Run the kernels again. The result is overwritten by the next call."""
        self._graph.replay()
        return self.result
