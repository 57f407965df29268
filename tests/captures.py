"""CUDA graphs without CUDA: a stand-in that replays on the CPU, and a watch over what is captured.

:func:`graphs_on_cpu` puts the stand-in in the place of ``torch.cuda.graph`` and lets code believe that
it is on a device: nothing is looked at, and no loop in C runs. A capture records the operations that
reach the dispatcher, with their tensors. A replay runs them again in the same storage, so that a number
which Python had computed from the first inputs shows as a wrong result for the next.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memspan import cuda_graphs, devices
from memspan.native import library

WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero",
    "bincount", "repeat_interleave",
}  # fmt: skip
"""Operations whose result or shape the host has to know."""
HOST = {
    f"torch.{name}"
    for name in (
        "tensor", "as_tensor", "from_numpy", "Tensor.cpu", "Tensor.numpy", "Tensor.tolist",
        "Tensor.item", "Tensor.new_tensor", "Tensor.__bool__", "Tensor.__int__", "Tensor.__float__",
        "Tensor.__index__",
    )
}  # fmt: skip
"""Functions that copy to or from the host; on the CPU some never reach the dispatcher."""


class Waits(TorchFunctionMode):
    """Lists functions that copy to or from the host, by name."""

    def __init__(self, forbidden: bool = False) -> None:
        super().__init__()
        self.names: list[str] = []
        self._forbidden = forbidden

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = resolve_name(func) or getattr(func, "__name__", "")
        if name in HOST:
            self.names.append(name)
        assert not (self.names and self._forbidden), f"{name} copies to or from the host"
        if self._forbidden and name.endswith(("__getitem__", "__setitem__")):
            at = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(i, list) for i in at), (
                f"{name}: a list is copied to the device"
            )
        return func(*args, **(kwargs or {}))


class Capturable(TorchDispatchMode):
    """Forbids what must not run in a capture: to wait for the device, to copy to or from the host, and
    to keep a tensor beyond the capture, whose numbers replays would change.

    ::

        with Capturable() as watch:
            result = function()
            watch.only(result)
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[str, weakref.ref[Tensor]]] = []
        self._functions = Waits(forbidden=True)

    def __enter__(self) -> Capturable:
        self._functions.__enter__()
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self._functions.__exit__(kind, error, trace)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in WAITING, f"{name} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            indices = [t for t in args[1] if t is not None]
            assert all(t.dtype != torch.bool for t in indices), f"{name} by a mask waits"
        out = func(*args, **(kwargs or {}))
        given = _storages((args, kwargs))
        for t in _tensors(out):
            if t.untyped_storage()._cdata not in given:
                self._made.append((str(func), weakref.ref(t)))
        return out

    def only(self, *results: Any) -> None:
        """Check that only tensors in ``results`` still live, of all that were made."""
        gc.collect()
        wanted = _storages(results)
        living = [(name, made()) for name, made in self._made]
        kept = [
            f"{name} {[*t.shape]}"
            for name, t in living
            if t is not None and t.untyped_storage()._cdata not in wanted
        ]
        assert not kept, f"kept beyond the capture: {kept}"


class Recorder(TorchDispatchMode):
    """Records operations, and runs them again in the storage that they used."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = _storages((args, kwargs))
        fresh = any(t.untyped_storage()._cdata not in given for t in _tensors(out))
        # Views follow the storage that they are of.
        if fresh or func._schema.is_mutable:
            self._calls.append((func, args, kwargs, out if fresh else None))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, before in self._calls:
            after = func(*args, **kwargs)
            if before is not None:
                for old, new in zip(_tensors(before), _tensors(after), strict=True):
                    if old.untyped_storage()._cdata not in _storages((args, kwargs)):
                        old.copy_(new)


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def _storages(tree: Any) -> set[int]:
    return {t.untyped_storage()._cdata for t in _tensors(tree)}


class _Stream:
    def wait_stream(self, other: object) -> None:
        pass


class _Graph(Recorder):
    """Stands in for ``torch.cuda.CUDAGraph``."""


@contextlib.contextmanager
def _capture(graph: _Graph) -> Iterator[None]:
    """Stands in for ``torch.cuda.graph``: as there, nothing that is recorded has run afterwards."""
    watch = Capturable()
    with watch, graph:
        yield
    for func, args, kwargs, out in graph._calls:
        if not func._schema.is_mutable:
            for t in _tensors(out):
                if t.untyped_storage()._cdata not in _storages((args, kwargs)):
                    # What a graph has not computed yet is whatever was there.
                    t.fill_(torch.nan) if t.is_floating_point() else t.fill_(0)


@contextlib.contextmanager
def graphs_on_cpu() -> Iterator[None]:
    """Let CUDA graphs be captured on the CPU, by code that behaves as on a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "DEVICE", "cpu")
        patch.setattr(torch.cuda, "CUDAGraph", _Graph)
        patch.setattr(torch.cuda, "graph", _capture)
        patch.setattr(torch.cuda, "Stream", _Stream)
        patch.setattr(torch.cuda, "current_stream", _Stream)
        patch.setattr(torch.cuda, "stream", contextlib.nullcontext)
        patch.setattr(torch.cuda, "device", contextlib.nullcontext)
        patch.setattr(library, "functions", lambda *_: None)
        # Wherever it was imported to.
        patch.setattr(devices.can_look, "__code__", (lambda x: False).__code__)
        yield
