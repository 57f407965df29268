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
from memspan.lab.data.tables import data_library, row_texts
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


def read_dataset(name: str, field: str) -> dict[str, list[Text]]:
    """A data set's documents by its own names of splits; without splits, all of it is ``train``.

    Args:
        name: ``hf:...``, or a folder that the library saved.
        field: its column of texts.

    Raises:
        MemspanError: the library is missing; there is no such data set, or no network; it lacks the
            column, which must be text.
    """
    datasets = data_library(name)
    loaded = _load(datasets, name)
    parts = loaded if isinstance(loaded, dict) else {"train": loaded}
    found = {}
    for split, part in parts.items():
        # Its own fingerprint, which would show what has changed, is whatever its maker wrote there.
        key = ["datasets", os.path.abspath(name), split, field]
        documents = row_texts(part, field, f"{name}, {split}")
        found[split] = unpacked(key, documents, Path(name), again=True)
    return found


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
