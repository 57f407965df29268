"""Data sets of the Hugging Face library ``datasets``: folders that it saved, and names on its hub."""

from __future__ import annotations

import contextlib
import os
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memspan.errors import MemspanError
from memspan.lab.data.records import NAME_IT, ROWS, column_of, missing_field, record_text
from memspan.lab.data.texts import Text
from memspan.lab.data.unpacked import unpacked

PREFIX = "hf:"
"""Before a data set's name on the hub: ``hf:NAME`` or ``hf:NAME:CONFIGURATION``."""
SPLITS = {
    "train": "train",
    "validation": "validation",
    "valid": "validation",
    "dev": "validation",
    "test": "test",
}
"""Its names of splits to ours."""
TEXT = ("string", "large_string", "string_view", "null")
"""Its column types that hold text. The last has no values, so its rows are empty."""
NESTED = ("list", "dict")
"""Types of columns that may hold text inside, by a path."""


def read_dataset(name: str, field: str) -> dict[str, list[Text]]:
    """A data set's documents by its own names of splits; without splits, all of it is ``train``.

    Args:
        name: ``hf:...``, or a folder that the library saved.
        field: its column of texts.

    Raises:
        MemspanError: the library is missing; there is no such data set, or no network; it lacks the
            column, which must be text.
    """
    try:
        import datasets
    except ImportError:
        raise MemspanError(f"{name} needs the library datasets: pip install datasets") from None
    loaded = _load(datasets, name)
    parts = loaded if isinstance(loaded, dict) else {"train": loaded}
    found = {}
    for split, part in parts.items():
        # Its own fingerprint, which would show what has changed, is whatever its maker wrote there.
        key = ["datasets", os.path.abspath(name), split, field]
        documents = _documents(part, field, f"{name}, {split}")
        found[split] = unpacked(key, documents, Path(name), again=True)
    return found


def _documents(part: Any, field: str, where: str) -> Iterator[bytes]:
    column = column_of(field, part.column_names)
    if column not in part.column_names:
        raise missing_field(where, field, part.column_names)
    # Before a row is read, which would decode images and sounds.
    kind = getattr(part.features[column], "dtype", "list")
    if column == field and kind not in (*TEXT, *NESTED):
        raise MemspanError(f"{where}: {field} is of type {kind}, not text: {NAME_IT}")
    number = 0
    for rows in part.select_columns([column]).with_format(None).iter(ROWS):
        for value in rows[column]:
            number += 1
            yield record_text({column: value}, field, f"{where}, row {number:,}", number == 1)


def _load(datasets: Any, name: str) -> Any:
    path, _, configuration = name.removeprefix(PREFIX).partition(":")
    arguments = [path, configuration] if configuration else [path]
    on_hub = name.startswith(PREFIX)
    try:
        if not on_hub:
            return datasets.load_from_disk(name)
        with _offline_unless_reachable(datasets):
            return datasets.load_dataset(*arguments)
    except Exception as error:
        # The library raises what its many parts raise; for the hub, usually the network is missing.
        reason = str(error)[:200]
        if not on_hub:
            raise MemspanError(
                f"{name} is a damaged data set ({reason}): save it anew with save_to_disk"
            ) from None
        call = ", ".join(map(repr, arguments))
        raise MemspanError(
            f"cannot load {path} from the hub ({reason}): where there is a network, run "
            f"datasets.load_dataset({call}).save_to_disk('FOLDER') in Python, then give that "
            "folder as the corpus"
        ) from None


@contextlib.contextmanager
def _offline_unless_reachable(datasets: Any) -> Iterator[None]:
    """Have the libraries take what is in their own caches where the hub's name does not resolve: they
    would ask five times more, waiting longer each time."""
    from huggingface_hub import constants

    host = urllib.parse.urlsplit(constants.ENDPOINT).hostname
    if urllib.request.getproxies() or _resolves(host):
        yield
        return
    switches = ((constants, "HF_HUB_OFFLINE"), (datasets.config, "HF_HUB_OFFLINE"))
    before = [getattr(module, name) for module, name in switches]
    try:
        for module, name in switches:
            setattr(module, name, True)
        yield
    except Exception as error:
        raise ConnectionError(f"there is no network: {host} is not found") from error
    finally:
        for (module, name), value in zip(switches, before, strict=True):
            setattr(module, name, value)


def _resolves(host: str | None) -> bool:
    try:
        return bool(socket.getaddrinfo(host, 443))
    except OSError:
        return False
