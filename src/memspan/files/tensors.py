"""Tensors on disk: safetensors with a checksum over names, values and header. Nothing is unpickled."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from memspan.errors import MemspanError
from memspan.files.disk import write_atomically

SEAL = "sha256"
TYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""safetensors' names of types, in the order in which it writes tensors."""


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and values, sorted by name."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        total.update(_bytes(tensor))
    return total.hexdigest()


def save_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> str:
    """Write ``tensors`` atomically, with ``header`` and a checksum of both in the file's metadata.

    Each is looked up several times and held only while it is used, so a mapping that reads or copies
    tensors on demand need not hold all in memory.

    Returns:
        The checksum.

    Raises:
        MemspanError: the disk is full, the folder cannot be written, or a tensor's type is not one of
            :data:`TYPES`.
    """
    sealed = _seal(header, tensors)
    # One entry: safetensors writes several in no fixed order, and equal runs give equal files.
    metadata = {"memspan": json.dumps({**header, SEAL: sealed}, sort_keys=True)}
    write_atomically(path, _content(tensors, metadata))
    return sealed


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and header of a file that :func:`save_tensors` wrote; the header includes its checksum.

    Raises:
        MemspanError: the file is missing, not safetensors, truncated or altered.
    """
    tensors, header = _checked(path)
    # Cloned to be aligned: in the file, tensors begin at any address, and sums over unaligned ones may
    # round differently, so that a resumed run would differ.
    return {name: tensor.clone() for name, tensor in tensors.items()}, header


def checked_header(path: Path) -> dict[str, str]:
    """The header from :func:`load_tensors`; the tensors are verified but not kept."""
    return _checked(path)[1]


def _checked(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, not aligned, and its header; refuses an altered file."""
    with _opened(path) as file:
        header, tensors = _header(file), _tensors(file)
        # Fails for types that PyTorch cannot compute with, which are never saved.
        sealed = _seal({k: v for k, v in header.items() if k != SEAL}, tensors)
    if header.get(SEAL) != sealed or not all(isinstance(v, str) for v in header.values()):
        raise MemspanError(
            f"{path} is damaged (its checksum is wrong): restore it or write it again"
        )
    return tensors, header


def load_foreign(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file that others wrote, which has no checksum of ours."""
    with _opened(path) as file:
        return _tensors(file)


def read_header(path: Path) -> dict[str, object]:
    """The header of a file that :func:`save_tensors` wrote, unverified; empty for any other file."""
    try:
        with _opened(path) as file:
            return _header(file)
    except MemspanError:
        return {}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file; errors in reading it name it."""
    if not path.is_file():
        raise MemspanError(f"{path} is missing: check the path, or restore the file")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise MemspanError(
            f"{path} is damaged, or not a safetensors file ({error}): restore it or write it again"
        ) from None


def _header(file: Any) -> dict[str, Any]:
    return dict(json.loads((file.metadata() or {}).get("memspan", "{}")))


def _tensors(file: Any) -> dict[str, Tensor]:
    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _bytes(tensor: Tensor) -> memoryview:
    """A tensor's values, copied only where they are on another device or not contiguous."""
    plain = tensor.detach().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def _content(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """The pieces of a file equal to what safetensors writes, which copies all tensors first."""
    listed: dict[str, object] = {"__metadata__": metadata}
    forms = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in tensors.items()}
    for name, (dtype, _) in forms.items():
        if dtype not in TYPES:
            raise MemspanError(
                f"{name} is of type {dtype}, which files do not have: convert it, such as to float32"
            )
    rank = {dtype: number for number, dtype in enumerate(TYPES)}
    names = sorted(forms, key=lambda name: (rank[forms[name][0]], name))
    end = 0
    for name in names:
        dtype, shape = forms[name]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        listed[name] = {"dtype": TYPES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(listed, ensure_ascii=False, separators=(",", ":")).encode()
    # Values begin at a multiple of eight.
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield _bytes(tensors[name])


def _seal(header: Mapping[str, object], tensors: Mapping[str, Tensor]) -> str:
    content = json.dumps(dict(header), sort_keys=True) + digest(tensors)
    return hashlib.sha256(content.encode()).hexdigest()
