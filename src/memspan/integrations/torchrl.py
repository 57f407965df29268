"""A backbone in TorchRL: its memory travels in the tensordict, from a step to the next.

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

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.data import Composite, Unbounded
from torchrl.envs import TensorDictPrimer
from torchrl.modules import recurrent_mode

from memspan.errors import MemspanError
from memspan.memory import Memory
from memspan.models import Backbone


class MemoryModule(TensorDictModuleBase):  # type: ignore[misc]
    """Reads vectors with a memory, as TorchRL's ``LSTMModule`` does with its state.

    Step by step, for entries of any batch size: the memory is read from ``memory_key``, emptied where
    ``is_init`` is true, and written to ``("next", memory_key)``. Within ``set_recurrent_mode(True)``
    the last dimension is time: all steps are read in one pass from the memory of the first, episodes
    begin where ``is_init`` is true, and gradients flow through the pass; memories of later steps stay
    as they were collected.

    Args:
        backbone: of any architecture. Where it says ``cut_invariant()``, a slice has the values of
            acting.
        in_key: vectors ``[..., D]``.
        out_key: the backbone's output, ``[..., D]``.
        memory_key: under which the memory's tensors stand.
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
        self.in_key, self.out_key, self.memory_key = in_key, out_key, memory_key
        # Of tensors, one by one: TorchRL's estimators take no nested tensordicts.
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
            MemspanError: in recurrent mode there is no dimension of time, or the entries of the memory
                are not those of this backbone.
        """
        if not recurrent_mode():
            steps = tensordict.reshape(-1)
            hidden, after = self._read(steps.unsqueeze(-1))
            tensordict.set(self.out_key, hidden[:, 0].reshape(*tensordict.shape, -1))
            entry = TensorDict(after.tensors(), [len(steps)]).reshape(tensordict.shape)
            tensordict.set(("next", self.memory_key), entry)
            return tensordict
        if not tensordict.ndim:
            raise MemspanError("recurrent mode needs a tensordict whose last dimension is time")
        slices = tensordict.reshape(-1, tensordict.shape[-1])
        hidden, _ = self._read(slices)
        tensordict.set(self.out_key, hidden.reshape(*tensordict.shape, -1))
        return tensordict

    def _read(self, slices: TensorDictBase) -> tuple[Tensor, Memory]:
        """Slices ``[B, T]`` from the memory of their first step."""
        starts = slices.get("is_init").reshape(slices.shape)
        memory = self.backbone.initial_memory(len(slices))
        if (given := slices.get(self.memory_key, None)) is not None:
            fields = {name: tensor[:, 0] for name, tensor in given.items()}
            expected = {name: tensor.shape for name, tensor in memory.tensors().items()}
            if {name: tensor.shape for name, tensor in fields.items()} != expected:
                raise MemspanError(
                    f"the entries of {self.memory_key!r} are not a memory of this backbone: use its "
                    "own make_tensordict_primer()"
                )
            memory = type(memory).from_tensors(fields)
        out = self.backbone(slices.get(self.in_key), memory, starts=starts)
        return out.hidden, out.memory
