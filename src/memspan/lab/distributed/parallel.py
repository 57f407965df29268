"""The model as training runs it: plain, replicated by DDP, or sharded by FSDP2."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from memspan.lab.data.streams import Segment
from memspan.memory import Memory
from memspan.models import LanguageModel
from memspan.models.output import Output

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Parallel = Literal["ddp", "fsdp"]


class ParallelModel:
    """The model as training runs it. This class runs it as it is, in one process."""

    sharded = False
    """True if a forward pass is collective, so that all processes must run the same number of them."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def __call__(self, segment: Segment, memory: Memory) -> Output:
        """Read this process's rows of a segment."""
        return _read(self.model, segment, memory)

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[object]:
        """Average gradients over processes in the backward passes inside, or only accumulate them."""
        return nullcontext()


class ReplicatedModel(ParallelModel):
    """DDP: every process has the whole model; gradients are averaged while they are computed."""

    def __init__(self, model: LanguageModel) -> None:
        from torch.nn.parallel import DistributedDataParallel

        super().__init__(model)
        # Some options leave parameters without a gradient. Buffers (memory is none) are the same in all
        # processes from the start.
        with warnings.catch_warnings():
            # The newer name for broadcast_buffers is missing in older releases.
            warnings.simplefilter("ignore", FutureWarning)
            self._wrapped = DistributedDataParallel(
                _LossOnly(model), find_unused_parameters=True, broadcast_buffers=False
            )

    def __call__(self, segment: Segment, memory: Memory) -> Output:
        return self._wrapped(segment, memory)[-1]()

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[object]:
        return nullcontext() if enabled else self._wrapped.no_sync()


class _LossOnly(nn.Module):
    """Returns only tensors of the loss: DDP must not wait for parameters used for memory alone."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, segment: Segment, memory: Memory) -> tuple[Any, ...]:
        output = _read(self.model, segment, memory)
        # DDP searches dataclasses for tensors, but not functions.
        return output.losses, output.auxiliary_loss, lambda: output


def _read(model: LanguageModel, segment: Segment, memory: Memory) -> Output:
    return model(segment.inputs, memory, targets=segment.targets, starts=segment.starts)


class ShardedModel(ParallelModel):
    """FSDP2: every process has a shard of each parameter, and gathers the others when needed."""

    sharded = True

    def __init__(self, model: LanguageModel, mesh: DeviceMesh) -> None:
        from torch.distributed.fsdp import fully_shard

        super().__init__(model)
        for unit in model.units():
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.register_forward_hook(_reshard_after_reading)

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[object]:
        module: Any = self.model
        module.set_requires_gradient_sync(enabled)
        return nullcontext()


def _reshard_after_reading(model: Any, *_: object) -> None:
    """Free the outermost parameters, which would stay gathered for a backward pass that never comes."""
    if not torch.is_grad_enabled():
        model.reshard()


def parallel_model(model: LanguageModel, kind: Parallel, mesh: DeviceMesh | None) -> ParallelModel:
    """Wrap ``model`` for training; ``mesh``: all processes (None: there is only this one)."""
    if mesh is None:
        return ParallelModel(model)
    return ShardedModel(model, mesh) if kind == "fsdp" else ReplicatedModel(model)
