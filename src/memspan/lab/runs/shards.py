"""The tensors of a checkpoint that several processes wrote: the folder ``shards``, a file for each.

The format is torch.distributed.checkpoint's for safetensors: each file's header says which part of
which tensor it has, so that any number of processes can read them, and nothing is unpickled (the
metadata of torch's default format is a pickle).
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from memspan.errors import MemspanError
from memspan.files.disk import sync_folder
from memspan.lab.runs.checkpoint_files import Checkpoint, State

# torch.distributed.checkpoint takes seconds to import: only the functions that need it do.
if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

SHARDS = "shards"
"""The folder's name in a checkpoint's folder."""
WEIGHT = "model/"
"""Prefix of the weights' names among all tensors."""
Target = Callable[[str, torch.Size, torch.dtype], Tensor]
"""Maps a saved tensor's name, shape and type to the tensor to read it into; a DTensor reads only this
process's part."""


def _allow_reading_alone() -> None:
    # Reading without a process group is intended.
    warnings.filterwarnings("ignore", "torch.distributed is disabled")


Load = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""Fills tensors, by name, and returns them."""


def save_shards(folder: Path, checkpoint: Checkpoint, group: dist.ProcessGroup) -> Future[None]:
    """Start writing a checkpoint's tensors; all processes call this.

    Tensors are DTensors, or the same in all processes.

    Tensors may change again as soon as this returns. ``group`` is in use until the future is done.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import async_save

    tensors = {f"{WEIGHT}{name}": tensor for name, tensor in checkpoint.weights.items()}
    tensors |= checkpoint.training
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    saving = async_save(tensors, storage_writer=writer, process_group=group)
    assert isinstance(saving, Future)
    return saving


def checksums(folder: Path) -> dict[str, str]:
    """Sync the shards in ``folder`` to disk; returns SHA-256 by path relative to ``state.json``."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            found[f"{SHARDS}/{path.name}"] = hashlib.file_digest(file, hashlib.sha256).hexdigest()
    sync_folder(folder)
    return found


def read(
    folder: Path, state: State, target: Target | None = None, verify: bool = True
) -> Checkpoint:
    """Read the checkpoint in ``folder``, whose ``state.json`` holds ``state``.

    ``target``: makes the tensors to read into (None: complete ones). ``verify``: compare checksums,
    which one process of several does for all.
    """
    _refuse_damaged(folder, state, verify)
    load, entries = _loader(folder / SHARDS)
    made = target or _complete
    with _naming(folder / SHARDS):
        wanted = {n: made(n, entry.size, entry.properties.dtype) for n, entry in entries.items()}
    tensors = load(wanted)
    return _checkpoint(tensors, tensors.__getitem__, state)


def opened(folder: Path, state: State) -> Checkpoint:
    """Like :func:`read`, but each tensor is read whenever it is looked up, and not kept."""
    _refuse_damaged(folder, state, verify=True)
    load, entries = _loader(folder / SHARDS)

    def tensor(name: str) -> Tensor:
        entry = entries[name]
        return load({name: _complete(name, entry.size, entry.properties.dtype)})[name]

    return _checkpoint(entries, tensor, state)


def _refuse_damaged(folder: Path, state: State, verify: bool) -> None:
    wanted = {n: check for n, check in state["files"].items() if n.startswith(f"{SHARDS}/")}
    if not wanted or not (folder / SHARDS).is_dir():
        raise MemspanError(f"{folder / SHARDS} is missing: restore it")
    if verify:
        found = checksums(folder / SHARDS)
        for name in sorted({*wanted, *found}):
            if wanted.get(name) != found.get(name):
                how = "damaged" if name in found else "missing"
                raise MemspanError(f"{folder / name} is {how}: restore it")


class _Tensors(Mapping[str, Tensor]):
    """Tensors that a function returns when they are looked up."""

    def __init__(self, names: Mapping[str, str], tensor: Callable[[str], Tensor]) -> None:
        self._names = names
        self._tensor = tensor

    def __getitem__(self, name: str) -> Tensor:
        return self._tensor(self._names[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _checkpoint(names: Iterable[str], tensor: Callable[[str], Tensor], state: State) -> Checkpoint:
    names = list(names)
    weights = {name.removeprefix(WEIGHT): name for name in names if name.startswith(WEIGHT)}
    training = {name: name for name in names if not name.startswith(WEIGHT)}
    return Checkpoint(_Tensors(weights, tensor), _Tensors(training, tensor), state)


def _loader(folder: Path) -> tuple[Load, Mapping[str, TensorStorageMetadata]]:
    """A function that fills given tensors, by name, from a folder of shards, and its entries."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    with _naming(folder):
        metadata = reader.read_metadata()
        entries = _entries(metadata)
    # Otherwise each load would read it again.
    reader.read_metadata = lambda: metadata  # type: ignore[method-assign]
    _allow_reading_alone()

    def loaded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        with _naming(folder):
            load(tensors, storage_reader=reader, no_dist=True)
        return tensors

    return loaded, entries


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Turn errors in reading shards into one that names their ``folder``."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (
        *(SafetensorError, CheckpointException, AssertionError, AttributeError),
        *(OSError, LookupError, TypeError, ValueError, RuntimeError),
    ) as error:
        raise MemspanError(f"{folder} is damaged ({str(error)[:200]}): restore it") from None


def _complete(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _entries(metadata: Metadata) -> Mapping[str, TensorStorageMetadata]:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        elements = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        if elements != math.prod(entry.size):
            # Before allocating memory for elements that no file has.
            raise ValueError(f"{name} has {elements:,} elements, not {math.prod(entry.size):,}")
        entries[name] = entry
    return entries
