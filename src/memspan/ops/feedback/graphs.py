"""The Feedback Transformer's recurrence step by step in PyTorch, each direction as one CUDA graph.

A step is some twelve small kernels per layer, which take longer to launch than to run. A graph is
captured for each size of a segment, and owns the tensors that it reads and writes: a call copies its
own there and back. **It has not been run on a GPU yet.**
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor

from memspan import cuda_graphs
from memspan.ops.feedback import steps
from memspan.ops.feedback.buffers import Buffers, Options

new_slots = steps.new_slots
MOST = 8
"""Graphs that are kept: those of the sizes that were used last."""
_LEFT = {
    "streams", "queries", "attended", "activated", "vectors", "probabilities", "sums", "before", "kv",
}  # fmt: skip
"""Tensors that the loop forward fills."""


def obstacle(like: Tensor) -> str | None:
    """Why a loop over tensors such as ``like`` cannot be captured; None if it can."""
    return None if like.device.type == cuda_graphs.DEVICE else "needs CUDA: use fused"


class _Graph:
    """One direction of the loop for tensors of certain sizes."""

    def __init__(self, run: Callable[[Buffers], None], like: Buffers) -> None:
        self._tensors = {name: t.clone() for name, t in like.items()}
        streams = self._tensors.get("d_streams")
        if streams is not None and _shared(like["d_added"], like["d_streams"]):
            self._tensors["d_added"] = streams[1:]
        self._graph = cuda_graphs.Captured(
            lambda: run(self._tensors), next(iter(like.values())).device
        )

    def __call__(self, b: Buffers, results: Callable[[str], bool]) -> None:
        """Run on the tensors of ``b``, and put those whose names are ``results`` back there."""
        for name, own in self._tensors.items():
            own.copy_(b[name])
        self._graph.replay()
        for name, own in self._tensors.items():
            if results(name):
                b[name].copy_(own)


_graphs: OrderedDict[tuple[Any, ...], _Graph] = OrderedDict()
_lock = threading.Lock()


def _shared(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _run(
    direction: str,
    options: Options,
    run: Callable[[Buffers], None],
    b: Buffers,
    results: Callable[[str], bool],
) -> None:
    """Run the graph of this direction for tensors of these sizes, which is captured at first use."""
    sizes = tuple((name, t.shape, t.dtype, t.device) for name, t in b.items())
    key = (direction, options, sizes)
    # One at a time: a graph has one set of tensors.
    with _lock:
        graph = _graphs.pop(key, None) or _Graph(run, b)
        _graphs[key] = graph
        if len(_graphs) > MOST:
            _graphs.popitem(last=False)
        graph(b, results)


def prepare(buffers: Buffers, options: Options) -> Callable[[Buffers], None]:
    """As :func:`memspan.ops.feedback.steps.prepare`."""

    def run(b: Buffers) -> None:
        # All within the capture: factors of dropout are made of this call's masks.
        steps.prepare(b, options)(b)

    def forward(given: Buffers) -> None:
        _run("forward", options, run, buffers | given, _LEFT.__contains__)

    return forward


def backward(buffers: Buffers, options: Options, gradients: Buffers) -> None:
    """As :func:`memspan.ops.feedback.steps.backward`."""

    def run(b: Buffers) -> None:
        steps.backward(b, options, {name: b[name] for name in gradients})

    _run("backward", options, run, buffers | gradients, gradients.__contains__)
