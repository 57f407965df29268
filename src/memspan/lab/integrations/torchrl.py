"""A backbone in TorchRL: its memory travels in the tensordict, from one step to the next.

Act, then train on slices from the memory with which they began::

    memory = MemoryModule(backbone, in_key="embedding", out_key="hidden")
    env = TransformedEnv(env, Compose(InitTracker(), memory.make_tensordict_primer()))
    policy = TensorDictSequential(encoder, memory, head)
    steps = env.rollout(64, policy)
    with set_recurrent_mode(True):
        policy(steps)
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchrl.data import Composite, Unbounded
from torchrl.envs import TensorDictPrimer
from torchrl.modules import recurrent_mode

from memspan.errors import MemspanError
from memspan.memory import Memory
from memspan.models import Backbone
from memspan.models.segments import padding_mask

__all__ = ["MemoryModule"]


class MemoryModule(TensorDictModuleBase):  # type: ignore[misc]
    """Reads vectors with a memory, as TorchRL's ``LSTMModule`` does with its state.

    Step by step, for entries of any batch size: the memory is read from ``memory_key``, emptied where
    ``is_init`` is true, and written to ``("next", memory_key)``. Within ``set_recurrent_mode(True)``
    the last dimension is time: all steps are read in one pass from the memory of the first, episodes
    begin where ``is_init`` is true, and gradients flow through the pass; memories of later steps stay
    as they were collected. Where a slice sampler set ``is_init`` in the middle of an episode, reading
    goes on from the memory that was stored there.

    Args:
        backbone: of any architecture. If it is ``cut_invariant()``, a slice has the same values as
            acting.
        in_key: vectors ``[..., D]``.
        out_key: the backbone's output, ``[..., D]``.
        memory_key: the entry with the memory's tensors.
    """

    def __init__(
        self,
        backbone: Backbone[Any],
        in_key: str = "embedding",
        out_key: str = "hidden",
        memory_key: str = "memory",
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.in_key = in_key
        self.out_key = out_key
        self.memory_key = memory_key
        # Each tensor is a key: TorchRL's estimators do not take nested tensordicts.
        fields = list(backbone.initial_memory(1).tensors())
        self.in_keys = [in_key, "is_init", *((memory_key, name) for name in fields)]
        self.out_keys = [out_key, *(("next", memory_key, name) for name in fields)]

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """The transform that puts empty memories into an environment's first tensordict, where their
        shapes are declared."""
        empty = self.backbone.initial_memory(1).tensors()
        fields = {name: Unbounded(t.shape[1:], t.device, t.dtype) for name, t in empty.items()}
        return TensorDictPrimer({self.memory_key: Composite(fields)}, expand_specs=True)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Read a step or, in recurrent mode, slices ``[..., T]``.

        Raises:
            MemspanError: in recurrent mode there is no dimension of time; ``is_init`` is missing or,
                after an episode's first step, the memory; the memory is not this backbone's.
        """
        recurrent = recurrent_mode()
        if recurrent and not tensordict.ndim:
            raise MemspanError("recurrent mode needs a tensordict whose last dimension is time")
        slices = tensordict.reshape(-1, tensordict.shape[-1] if recurrent else 1)
        if (starts := slices.get("is_init", None)) is None:
            raise MemspanError(
                "there is no entry 'is_init': put InitTracker() into the environment"
            )
        x = slices.get(self.in_key)
        starts = starts.reshape(slices.shape)
        stored = slices.get(self.memory_key, None)
        if recurrent:
            hidden = self._read_slices(x, starts, stored)
        else:
            if stored is None and not starts.all():
                raise MemspanError(
                    f"there is no entry {self.memory_key!r} to go on from: put this module's "
                    "make_tensordict_primer() into the environment"
                )
            out = self.backbone(x, self._memory(stored, len(x)), starts=starts)
            hidden = out.hidden
            after = TensorDict(out.memory.tensors(), [len(x)])
            tensordict.set(("next", self.memory_key), after.reshape(tensordict.shape))
        tensordict.set(self.out_key, hidden.reshape(*tensordict.shape, -1))
        return tensordict

    def _read_slices(self, x: Tensor, starts: Tensor, stored: TensorDictBase | None) -> Tensor:
        """``[B, T, D]``, as pieces that each go on from the memory stored with their first step."""
        first = torch.zeros_like(starts)
        first[:, 0] = True
        if stored is not None:
            # Slice samplers mark where slices begin. At an episode's start nothing has been stored.
            marked = starts & (stored["tokens_seen"] > 0)
            first = first | marked
            starts = starts & ~marked
        begins = first.flatten().nonzero().flatten()
        lengths = begins.diff(append=begins.new_tensor([first.numel()]))
        pieces, starts = (
            pad_sequence(t.flatten(0, 1).split(lengths.tolist()), batch_first=True)
            for t in (x, starts)
        )
        memory = self._memory(None if stored is None else stored.reshape(-1)[begins], len(begins))
        hidden = self.backbone(pieces, memory, starts=starts, lengths=lengths).hidden
        return hidden[padding_mask(lengths, pieces.shape[1])]  # type: ignore[no-any-return]

    def _memory(self, stored: TensorDictBase | None, rows: int) -> Memory:
        memory: Memory = self.backbone.initial_memory(rows)
        if stored is None:
            return memory
        fields = dict(stored.reshape(-1).items())
        expected = {name: tensor.shape for name, tensor in memory.tensors().items()}
        if {name: tensor.shape for name, tensor in fields.items()} != expected:
            raise MemspanError(
                f"the entries of {self.memory_key!r} are not a memory of this backbone: use its own "
                "make_tensordict_primer()"
            )
        return type(memory)(**fields)
