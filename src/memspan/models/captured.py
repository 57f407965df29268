"""The reader of any backbone whose single tokens are one CUDA graph each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from memspan.cuda_graphs import Captured, obstacle
from memspan.errors import MemspanError
from memspan.models.output import BackboneOutput
from memspan.models.packing import GLOBAL_HOOKS, HOOKS, Watch
from memspan.models.protocol import Backbone
from memspan.models.readers import M, PassReader, by_one_thread


class CapturedReader(PassReader[M]):
    """Reads by whole passes, as :class:`PassReader`; the pass of a single token is captured in a CUDA
    graph and launched as one. The memory stays where it is, and the graph writes to it.

    A graph has the operations that modules ran when it was captured. Hooks, which it would skip, are
    refused, and so is reading on after the weights have changed.

    Raises:
        MemspanError: the backbone is not on CUDA, or has hooks.
    """

    @torch.no_grad()
    def __init__(self, backbone: Backbone[M], memory: M, **options: Any) -> None:
        if reason := obstacle(backbone.device):
            raise MemspanError(f"a CUDA graph {reason}")
        if any(GLOBAL_HOOKS) or any(_has_hooks(module) for module in backbone.modules()):
            raise MemspanError(
                "a CUDA graph would skip hooks: remove them, or leave the option out"
            )
        super().__init__(backbone, memory, **options)
        self.watch = Watch(backbone)
        self._token: Tensor
        self._graph: Captured[Tensor] | None = None
        self._settings: tuple[object, ...] = ()

    @property
    @by_one_thread
    def memory(self) -> M:  # type: ignore[override]
        """The memory after the last token: a copy, which reading on does not change."""
        return self._own.map(Tensor.clone)

    @memory.setter
    def memory(self, memory: M) -> None:
        if hasattr(self, "_own"):
            self._write(memory)
        else:
            self._own = memory.map(Tensor.clone)

    def select(self, rows: Tensor | list[int]) -> M:
        return self._own.select(rows)

    def _read_vectors(self, x: Tensor, starts: Tensor | None) -> Tensor:
        self.watch.refuse_changes()
        if x.shape[1] > 1 or starts is not None:
            hidden, after = self._pass(x, starts)
            self._hold(after)
            self._write(after)
            return hidden
        if self._graph is None or self._settings != _settings(x):
            self._capture(x)
        assert self._graph is not None
        self._token.copy_(x)
        # A copy, since the next token overwrites it.
        return self._graph.replay().clone()

    def _pass(self, x: Tensor, starts: Tensor | None = None) -> tuple[Tensor, M]:
        output: BackboneOutput[M] = nn.Module.__call__(
            self._backbone, x, self._own, starts=starts, **self._options
        )
        return output.hidden, output.memory

    def _capture(self, x: Tensor) -> None:
        """Capture the pass of a token such as ``x``, under the settings of now."""
        self._hold(self._pass(x)[1])
        before = self.memory
        self._token = x.clone()
        self._settings = _settings(x)
        self._graph = Captured(self._step, x.device)
        self._write(before)

    def _step(self) -> Tensor:
        hidden, after = self._pass(self._token)
        self._write(after)
        return hidden

    def _hold(self, after: M) -> None:
        """Make room for memories such as ``after``, where the one that was given is of other types.

        Raises:
            MemspanError: it is of other sizes.
        """
        own = self._own.tensors()
        new = after.tensors()
        if any(own[name].shape != t.shape for name, t in new.items()):
            raise MemspanError(
                "a CUDA graph needs a memory whose size stays: leave the option out, or begin with "
                "a memory of the final size"
            )
        if any(own[name].dtype != t.dtype for name, t in new.items()):
            self._own = replace(
                self._own, **{name: own[name].to(t.dtype, copy=True) for name, t in new.items()}
            )
            self._graph = None

    def _write(self, memory: M) -> None:
        """Put the numbers of ``memory`` where the graph reads and writes."""
        new = memory.tensors()
        for name, own in self._own.tensors().items():
            own.copy_(new[name])


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, name) for name in HOOKS)


def _settings(x: Tensor) -> tuple[object, ...]:
    """Settings of torch that a pass obeys, and a graph does not notice."""
    kind = x.device.type
    return (
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.get_float32_matmul_precision(),
    )
