"""Tensors on disk: safetensors with a checksum over names, values and header. Nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from memspan.errors import MemspanError
from memspan.files.bytes import write_atomically

SEAL = "sha256"
MOST_TENSORS = 1 << 16
"""Maximum number in one file: each takes time to read, however small."""
HEADER_LIMIT = 1 << 25
"""Maximum size of a file's list of tensors, in bytes."""


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and values, sorted by name."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def save_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> str:
    """Write ``tensors`` atomically, with ``header`` and a checksum of both in the file's metadata.

    Returns:
        The checksum.

    Raises:
        MemspanError: the disk is full or the folder cannot be written.
    """
    copies = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    sealed = _seal(header, copies)
    # One entry: safetensors writes several in no fixed order, and equal runs give equal files.
    metadata = {"memspan": json.dumps({**header, SEAL: sealed}, sort_keys=True)}
    write_atomically(path, save(copies, metadata))
    return sealed


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and header of a file that :func:`save_tensors` wrote; the header has its checksum, too.

    Raises:
        MemspanError: the file is missing, not safetensors, truncated or altered.
    """
    if not path.is_file():
        raise MemspanError(f"{path} is missing: check the path, or restore the file")
    try:
        _check_list(path)
        with safe_open(path, framework="pt") as file:
            header = dict(json.loads((file.metadata() or {}).get("memspan", "{}")))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        # Fails for types that PyTorch cannot compute with, which are never saved.
        sealed = _seal({k: v for k, v in header.items() if k != SEAL}, tensors)
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise _damaged(path, error) from None
    if header.get(SEAL) != sealed or not all(isinstance(v, str) for v in header.values()):
        raise MemspanError(
            f"{path} is damaged (its checksum is wrong): restore it or write it again"
        )
    # Cloned to be aligned: in the file, tensors begin at any address, and sums over unaligned ones may
    # round differently, so that a resumed run would differ.
    return {name: tensor.clone() for name, tensor in tensors.items()}, header


def load_foreign(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file that others wrote, which has no checksum of ours.

    Raises:
        MemspanError: the file is missing, not safetensors or truncated.
    """
    if not path.is_file():
        raise MemspanError(f"{path} is missing: check the path, or restore the file")
    try:
        _check_list(path)
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise _damaged(path, error) from None


def read_header(path: Path) -> dict[str, object]:
    """The header of a file that :func:`save_tensors` wrote, unverified; empty for any other file."""
    try:
        _check_list(path)
        with safe_open(path, framework="pt") as file:
            return dict(json.loads((file.metadata() or {}).get("memspan", "{}")))
    except (SafetensorError, OSError, ValueError, TypeError):
        return {}


def _damaged(path: Path, error: Exception) -> MemspanError:
    reason = " ".join(str(error).split())
    return MemspanError(
        f"{path} is damaged or no safetensors file ({reason}): restore it or write it again"
    )


def _check_list(path: Path) -> None:
    """Refuse a list of tensors that would take long to parse.

    Raises:
        ValueError: it is too long.
    """
    with open(path, "rb") as file:
        # The safetensors format: the length of the list, then the list as JSON, an object per tensor.
        length = int.from_bytes(file.read(8), "little")
        listed = file.read(min(length, HEADER_LIMIT))
    if listed.count(b"{") > MOST_TENSORS + 2:
        raise ValueError(f"it lists more than {MOST_TENSORS:,} tensors")
    if len(listed) == HEADER_LIMIT:
        raise ValueError(f"its list of tensors is longer than {HEADER_LIMIT:,} bytes")


def _seal(header: Mapping[str, object], tensors: Mapping[str, Tensor]) -> str:
    content = json.dumps(dict(header), sort_keys=True) + digest(tensors)
    return hashlib.sha256(content.encode()).hexdigest()
