"""Training passes through the model: plain, replicated by DDP, or sharded by FSDP2."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from memspan.memory import Memory
from memspan.models import LanguageModel
from memspan.models.output import Output
from memspan.precision.products import Precision

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Parallel = Literal["ddp", "fsdp"]


class Passes:
    """In one process: the model itself."""

    sharded = False
    """Whether a pass needs all processes, each with the same number of passes."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def __call__(
        self, tokens: Tensor, memory: Memory, targets: Tensor, starts: Tensor | None
    ) -> Output:
        return self.model(tokens, memory, targets=targets, starts=starts)

    def exchange(self, now: bool) -> AbstractContextManager[Any]:
        """Passes within and their backward passes: average their gradients over processes now?"""
        return nullcontext()

    @property
    def scored(self) -> Any:
        """What :func:`memspan.evaluate.evaluate` and readers may use as the model."""
        return self.model


class ReplicatedPasses(Passes):
    """DDP: every process has the whole model; gradients are averaged while they are computed."""

    def __init__(self, model: LanguageModel) -> None:
        from torch.nn.parallel import DistributedDataParallel

        super().__init__(model)
        # Some options leave parameters without a gradient. Buffers are the same everywhere from the
        # start; memory is none of them.
        with warnings.catch_warnings():
            # Newer releases have another name for it, older ones only this.
            warnings.simplefilter("ignore", FutureWarning)
            self._wrapped = DistributedDataParallel(
                _Visible(model), find_unused_parameters=True, broadcast_buffers=False
            )

    def __call__(
        self, tokens: Tensor, memory: Memory, targets: Tensor, starts: Tensor | None
    ) -> Output:
        return self._wrapped(tokens, memory, targets, starts)[-1].output

    def exchange(self, now: bool) -> AbstractContextManager[Any]:
        return nullcontext() if now else self._wrapped.no_sync()


class _Visible(nn.Module):
    """Shows DDP only what the loss is made of: a parameter that no more than memory was computed with
    gets no gradient in this pass, and must not be waited for."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, memory: Memory, targets: Tensor, starts: Tensor | None
    ) -> tuple[Any, ...]:
        output = self.model(tokens, memory, targets=targets, starts=starts)
        return output.losses, output.auxiliary_loss, _Hidden(output)


class _Hidden:
    """Not a dataclass, which DDP would search for tensors."""

    def __init__(self, output: Output) -> None:
        self.output = output


class ShardedPasses(Passes):
    """FSDP2: every process has a part of each parameter and collects the others' when needed."""

    sharded = True

    def __init__(self, model: LanguageModel, mesh: DeviceMesh) -> None:
        from torch.distributed.fsdp import fully_shard

        super().__init__(model)
        self._empty = model.initial_memory(1)
        # Nothing here changes in place what a pass returned. For good: saves run in another thread,
        # and Python's filters are for all.
        warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view")
        for unit in model.units():
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def exchange(self, now: bool) -> AbstractContextManager[Any]:
        module: Any = self.model
        module.set_requires_gradient_sync(now)
        return nullcontext()

    @property
    def scored(self) -> Any:
        return _Sharded(self.model, self._empty)


class _Sharded:
    """A sharded model for scoring and generating: whole passes only, in which all processes join."""

    def __init__(self, model: LanguageModel, empty: Memory) -> None:
        self._model, self._empty = model, empty
        self.parameters = model.parameters

    def initial_memory(self, batch_size: int) -> Memory:
        return self._empty.select([0] * batch_size)

    def reader(
        self,
        memory: Memory | None = None,
        batch_size: int = 1,
        *,
        precision: Precision | None = None,
    ) -> _ShardedReader:
        return _ShardedReader(self._model, memory or self.initial_memory(batch_size), precision)

    @torch.no_grad()
    def __call__(
        self,
        tokens: Tensor,
        memory: Memory,
        targets: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Output:
        output: Output = self._model(tokens, memory, targets=targets, starts=starts)
        # The outermost parameters stay collected after a pass, for a backward pass that never comes.
        module: Any = self._model
        module.reshard()
        return output


class _ShardedReader:
    """As :class:`memspan.models.Reader`, but nothing is kept beside the memory."""

    def __init__(self, model: LanguageModel, memory: Memory, precision: Precision | None) -> None:
        self._model, self.memory, self._precision = model, memory, precision
        self.device = memory.tokens_seen.device

    def read(
        self, tokens: Tensor, *, targets: Tensor | None = None, starts: Tensor | None = None
    ) -> Tensor:
        precision = self._precision
        with precision.applied(self.device) if precision else nullcontext():
            output = _Sharded(self._model, self.memory)(tokens, self.memory, targets, starts)
        self.memory = output.memory
        result = output.logits if targets is None else output.losses
        assert result is not None
        return result


def passes(model: LanguageModel, kind: Parallel, mesh: DeviceMesh | None) -> Passes:
    """``mesh``: all processes (None: there is one)."""
    if mesh is None:
        return Passes(model)
    return ShardedPasses(model, mesh) if kind == "fsdp" else ReplicatedPasses(model)
