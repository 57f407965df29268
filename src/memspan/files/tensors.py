"""Tensors on disk: safetensors with a checksum over names, values and header. Nothing is unpickled."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from memspan.errors import MemspanError
from memspan.files.disk import unreadable, write_atomically

SEAL = "sha256"


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and values, sorted by name."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        # With one number or none, any strides count as contiguous, such as an expanded tensor's 0.
        values = _plain(tensor).as_strided((tensor.numel(),), (1,))
        total.update(values.view(torch.uint8).numpy().data)
    return total.hexdigest()


def save_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    header: Mapping[str, str],
    *,
    make_folder: bool = True,
) -> str:
    """Write ``tensors`` atomically, with ``header`` and a checksum of both in the file's metadata.

    Returns:
        The checksum.

    Raises:
        MemspanError: the disk is full, the folder cannot be written, or safetensors does not have a
            tensor's type.
    """
    plain, metadata, sealed = _contents(tensors, header)

    def write(temporary: Path) -> None:
        # Not from bytes in memory, which would be made twice.
        with _explained(plain):
            safetensors.torch.save_file(plain, temporary, metadata)

    write_atomically(path, write, make_folder=make_folder)
    return sealed


def write_tensors(
    file: IO[bytes], tensors: Mapping[str, Tensor], header: Mapping[str, str]
) -> None:
    """Write to a file object what :func:`save_tensors` writes to a path.

    Raises:
        MemspanError: it is not open for writing bytes, or safetensors does not have a tensor's type.
    """
    plain, metadata, _ = _contents(tensors, header)
    with _explained(plain):
        content = safetensors.torch.save(plain, metadata)
    try:
        file.write(content)
    except (AttributeError, TypeError, ValueError, OSError) as error:
        raise MemspanError(
            f"{reprlib.repr(file)} cannot be written to ({error}): give a path, or a file that is open "
            "in binary mode"
        ) from None


def load_tensors(source: Path | IO[bytes]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and header of a file that :func:`save_tensors` wrote; the header includes its checksum.

    ``source``: its path, or a file object that is read to its end.

    Raises:
        MemspanError: the file is missing, not safetensors, truncated or altered.
    """
    tensors, header = _checked(source)
    # Cloned to be aligned: in the file, tensors begin at any address, and sums over unaligned ones may
    # round differently, so that a resumed run would differ.
    return {name: tensor.clone() for name, tensor in tensors.items()}, header


def checked_header(path: Path) -> dict[str, str]:
    """The header from :func:`load_tensors`; the tensors are verified but not kept."""
    return _checked(path)[1]


def _checked(source: Path | IO[bytes]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, not aligned, and its header; refuses an altered file."""
    with _opened(source) as file:
        header = _header(file)
        tensors = _tensors(file)
        # Fails for types that PyTorch cannot compute with, which are never saved.
        sealed = _seal({k: v for k, v in header.items() if k != SEAL}, tensors)
    if header.get(SEAL) != sealed or not all(isinstance(v, str) for v in header.values()):
        raise MemspanError(
            f"{named(source)} is damaged (its checksum is wrong): restore it or write it again"
        )
    return tensors, header


def load_foreign(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file that others wrote, which has no checksum of ours."""
    with _opened(path) as file:
        return _tensors(file)


def read_header(source: Path | IO[bytes]) -> dict[str, object]:
    """The header of a file that :func:`save_tensors` wrote, unverified; empty for any other file.
    A file object is left where it was."""
    start = None if isinstance(source, Path) else source.tell()
    try:
        with _opened(source) as file:
            return _header(file)
    except MemspanError:
        return {}
    finally:
        if start is not None and not isinstance(source, Path):
            source.seek(start)


def named(source: Path | IO[bytes]) -> str:
    """A file's name for a message."""
    return (
        str(source) if isinstance(source, Path) else str(getattr(source, "name", "the file object"))
    )


@contextlib.contextmanager
def _opened(source: Path | IO[bytes]) -> Iterator[Any]:
    """A safetensors file; errors in reading it name it."""
    try:
        if isinstance(source, Path) and not source.is_file():
            raise MemspanError(f"{source} is missing: check the path, or restore the file")
        if not isinstance(source, Path):
            yield _InMemory(source.read())
            return
        with safe_open(source, framework="pt") as file:
            yield file
    except MemspanError:
        raise
    except OSError as error:
        raise unreadable(named(source), error) from None
    except (SafetensorError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise MemspanError(
            f"{named(source)} is damaged, or not a safetensors file ({error}): restore it or write it "
            "again"
        ) from None


class _InMemory:
    """The content of a safetensors file, as ``safe_open`` gives it."""

    def __init__(self, content: bytes) -> None:
        self._tensors = safetensors.torch.load(content)
        length = int.from_bytes(content[:8], "little")
        self._header = json.loads(content[8 : 8 + length])

    def metadata(self) -> dict[str, str]:
        return self._header.get("__metadata__") or {}

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]


def _header(file: Any) -> dict[str, Any]:
    return dict(json.loads((file.metadata() or {}).get("memspan", "{}")))


def _tensors(file: Any) -> dict[str, Tensor]:
    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _plain(tensor: Tensor) -> Tensor:
    """A tensor on the CPU with its values in order, copied only where it was not."""
    if type(tensor).__name__ == "DTensor":
        raise MemspanError(
            "a sharded model or memory (DTensors) has neither fingerprint nor file: gather it by "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True, "
            "and load that into a model that is not sharded"
        )
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _contents(
    tensors: Mapping[str, Tensor], header: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, str], str]:
    """The tensors and the metadata that safetensors writes, and the checksum."""
    plain = {}
    storages = set()
    for name, tensor in tensors.items():
        kept = _plain(tensor)
        # safetensors refuses tensors that share their values, such as fields of an empty memory.
        if kept.untyped_storage().data_ptr() in storages:
            kept = kept.clone()
        storages.add(kept.untyped_storage().data_ptr())
        plain[name] = kept
    sealed = _seal(header, plain)
    # One entry: safetensors writes several in no fixed order, and equal runs give equal files.
    return plain, {"memspan": json.dumps({**header, SEAL: sealed}, sort_keys=True)}, sealed


@contextlib.contextmanager
def _explained(tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Turn safetensors' errors in writing into :class:`MemspanError` or :class:`OSError`."""
    try:
        yield
    except KeyError as error:
        name = next(name for name, tensor in tensors.items() if tensor.dtype == error.args[0])
        raise MemspanError(
            f"{name} is of type {error}, which files do not have: convert it, such as to float32"
        ) from None
    except SafetensorError as error:
        # Its only word on errors of the system.
        if found := re.search(r"os error (\d+)", str(error)):
            number = int(found[1])
            raise OSError(number, os.strerror(number)) from None
        raise


def _seal(header: Mapping[str, object], tensors: Mapping[str, Tensor]) -> str:
    content = json.dumps(dict(header), sort_keys=True) + digest(tensors)
    return hashlib.sha256(content.encode()).hexdigest()
