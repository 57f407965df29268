"""Tensors of all processes in one folder, by torch.distributed.checkpoint: read back by any number.

The files are safetensors, one per process, each with the places of its parts in its header: nothing is
pickled, and a single process reads them as well. Not the default format of torch, whose metadata is.
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from memspan.errors import MemspanError
from memspan.files.bytes import sync_folder

SUFFIX = ".safetensors"


def save_shards(
    folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup
) -> Future[None]:
    """Begin to write; all processes call this. When it returns, ``tensors`` may change again.

    Args:
        folder: a new one.
        tensors: the same names in all processes: DTensors, and others that are the same everywhere.
        group: carries the processes' talk about it; in use until the future is done.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    saving = async_save(dict(tensors), storage_writer=writer, process_group=group)
    assert isinstance(saving, Future)
    return saving


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of tensors, which is flushed to the disk first."""
    found = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            found[path.name] = hashlib.file_digest(file, hashlib.sha256).hexdigest()
    sync_folder(folder)
    return found


def load_shards(
    folder: Path, target: Callable[[str, torch.Size, torch.dtype], Tensor]
) -> dict[str, Tensor]:
    """Read all tensors, or this process's parts of them.

    Args:
        folder: one that :func:`save_shards` wrote, and whose checksums are right.
        target: name, shape and type of a whole tensor to the tensor that is to be filled: a DTensor for
            a part.

    Raises:
        MemspanError: something is missing or does not fit together.
    """
    reader = HuggingFaceStorageReader(str(folder))
    try:
        metadata = reader.read_metadata()
        tensors = {}
        for name, entry in _entries(metadata).items():
            tensors[name] = target(name, entry.size, entry.properties.dtype)
        # That this process reads without the others is meant so. For good: this may be a thread of its
        # own, and Python's filters are for all.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except (
        *(SafetensorError, CheckpointException, AssertionError, AttributeError),
        *(OSError, LookupError, TypeError, ValueError, RuntimeError),
    ) as error:
        reason = " ".join(str(error).split())[:200]
        raise MemspanError(f"{folder} is damaged ({reason}): restore it") from None
    return tensors


def _entries(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    entries = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        there = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        if there != math.prod(entry.size):
            # Nor is memory taken for what is not there.
            raise ValueError(
                f"of {name} {there:,} elements are there, not {math.prod(entry.size):,}"
            )
        entries[name] = entry
    return entries
