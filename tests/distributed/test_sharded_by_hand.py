"""Models that a program of one's own shards by FSDP2, here among one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from architectures import CASES, ONE_OF_EACH, VOCABULARY
from memspan.errors import MemspanError
from memspan.models import LanguageModel
from memspan.ops import delta_rule
from readings import text

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_memories_of_a_sharded_model_are_plain(name: str, mesh: DeviceMesh) -> None:
    plain = LanguageModel(VOCABULARY, CASES[name].backbone).eval()
    model = copy.deepcopy(plain)
    for unit in model.units():
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    memory = model.initial_memory(2)
    assert {type(t) for t in memory.tensors().values()} == {torch.Tensor}
    for _ in range(2):
        expected = plain(text(2, 5), memory, targets=text(2, 5, 1))
        output = model(text(2, 5), memory, targets=text(2, 5, 1))
        output.loss.backward()
        torch.testing.assert_close(output.losses, expected.losses)
        memory = expected.memory.detach()
    with pytest.raises(MemspanError, match="gather it by"):
        model.fingerprint()


def test_operations_refuse_tensors_that_others_hold_a_part_of(mesh: DeviceMesh) -> None:
    """Loops in C would read from address 0."""
    q = torch.randn(1, 3, 2, 4)
    sharded = distribute_tensor(torch.randn(1, 2, 4, 4), mesh)
    with pytest.raises(MemspanError, match=r"weights is a DTensor.*full_tensor"):
        delta_rule(q, q, q, torch.rand(1, 3, 2), sharded)
