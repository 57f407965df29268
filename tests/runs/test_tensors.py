"""Files of tensors: written, and those of several processes converted, without a copy of them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from memspan.errors import MemspanError
from memspan.files.tensors import TYPES, load_tensors, save_tensors
from memspan.runs import shards
from memspan.runs.checkpoint_files import Checkpoint, read_tensors, write_tensors

STATUS, PEAKS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
SIZE = 1 << 18


def test_files_are_those_of_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "t"
    tensors = {f"{number}/ä\\": torch.ones(3).to(dtype) for number, dtype in enumerate(TYPES)}
    tensors |= {"": torch.zeros(()), "none": torch.empty(0, 2), "b": torch.arange(6.0).view(2, 3)}
    save_tensors(path, tensors | {"c": tensors["b"].T}, {"step": '"ü\n'})
    assert load_tensors(path)[1]["step"] == '"ü\n'
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert path.read_bytes() == save(tensors | {"c": tensors["b"].T.contiguous()}, metadata)


def test_a_type_that_files_do_not_have(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("older")
    with pytest.raises(MemspanError, match=r"a is of type torch\.complex128"):
        save_tensors(tmp_path / "t", {"a": torch.zeros(2, dtype=torch.complex128)}, {})
    assert [path.read_text() for path in tmp_path.iterdir()] == ["older"]


def test_shards_are_converted_one_at_a_time(tmp_path: Path) -> None:
    tensors = {f"{n:02}": torch.full((SIZE,), float(n)) for n in range(48)}
    state = _sharded(tmp_path, tensors)
    total = 2 * 4 * SIZE * len(tensors)
    del tensors
    if not PEAKS.is_file():
        pytest.skip("this system does not tell")
    PEAKS.write_text("5")
    before = _peak()
    files = write_tensors(tmp_path, shards.opened(tmp_path, state), {})
    assert _peak() - before < total / 4
    written = read_tensors(tmp_path, {**state, "files": files})
    for name, tensor in {**written.weights, **written.training}.items():
        assert tensor.unique() == int(name.removeprefix("more/"))


def _sharded(folder: Path, tensors: dict[str, Tensor]) -> Any:
    """Write ``tensors`` twice, as several processes do, as weights and as the rest; their state."""
    state: Any = {"step": 3, "corpus": ""}
    checkpoint = Checkpoint(tensors, {f"more/{n}": t for n, t in tensors.items()}, state)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        (folder / shards.SHARDS).mkdir()
        shards.save_shards(folder / shards.SHARDS, checkpoint, dist.group.WORLD).result()
    finally:
        dist.destroy_process_group()
    return {**state, "files": shards.checksums(folder / shards.SHARDS)}


def _peak() -> int:
    return int(STATUS.read_text().split("VmHWM:")[1].split()[0]) * 1024
